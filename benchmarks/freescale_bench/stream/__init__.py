"""`freescale train --follow`: kills, long streams, and preferences that shift."""
