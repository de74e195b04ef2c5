"""The web page of the controller: what K is chosen where, why, and what speculation gains.

    server.py  a thread with uvicorn, apart from the controller's loop    app.py   paths, token, headers
    view.py    a snapshot as what the page shows                          static/  the page itself

The page reads the same snapshot as ``/metrics`` (``controller/serve/snapshot.py``); nothing here can change
anything.
"""

from specpilot.controller.web.server import Page as Page
