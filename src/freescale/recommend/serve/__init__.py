"""Recommendations over HTTP. Needs the extra `serve`; `server.run` is the way in."""
