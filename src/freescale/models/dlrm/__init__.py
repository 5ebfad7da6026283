"""The ranking model of MLPerf's dlrm_v4_hstu: HSTU over events whose features stand side by side,
behind tokens of the request's context, and a network that judges candidates."""

from freescale.models.dlrm.head import DlrmHSTU, DlrmRanking

__all__ = ["DlrmHSTU", "DlrmRanking"]
