"""Groups of tables that are stored and exchanged together."""
