"""The map from ids to rows of a dynamic table."""
