"""The page at ``/``: one file, which may load and send nothing elsewhere."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib.resources import files

from fastapi import Response


class Page:
    """The page, with a policy that names its script by its digest."""

    def __init__(self) -> None:
        self._content = files("megakv.serving.http").joinpath("page.html").read_bytes()
        script = re.search(rb"<script>(.*?)</script>", self._content, re.DOTALL)
        assert script is not None
        digest = b64encode(hashlib.sha256(script[1]).digest()).decode()
        self._headers = {
            "content-security-policy": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    def response(self) -> Response:
        """As it is sent."""
        return Response(self._content, media_type="text/html", headers=self._headers)
