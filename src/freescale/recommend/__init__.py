"""Recommendations out of a trained model: load a run or an export, recommend, score, export."""
