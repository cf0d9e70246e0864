"""An OpenAI-compatible server over one engine (extra `server`): app.py is where requests enter."""
