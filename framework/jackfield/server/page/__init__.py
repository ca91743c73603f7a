"""The page for people at ``/``: a playground and a live view, one document without outside assets."""
