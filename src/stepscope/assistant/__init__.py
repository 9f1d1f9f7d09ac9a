"""Questions about runs: from assistants over MCP (``stepscope mcp``), from people in Slack (``stepscope slack``).

Both get what the page gets: ``hub_api`` calls the resources of the hub's API in this process, ``tools`` declares the
questions, ``answers`` bounds what is sent.  Nothing is computed here, and no language model is used.
"""
