"""How bytes get from rank to rank. The transport is passed in; nothing here is global."""
