"""Tables of any id: rows come with the ids that are seen, and go when others need the room."""
