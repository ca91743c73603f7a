"""A client of servers that speak OpenAI's API: for the commands that talk to a running server."""
