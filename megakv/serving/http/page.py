"""The page that shows a server at work."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib.resources import files

from fastapi import Response


def page() -> Response:
    """One file, with a policy that names its script by its digest: it may load and send nothing elsewhere."""
    content = files("megakv.serving.http").joinpath("page.html").read_bytes()
    script = re.search(rb"<script>(.*?)</script>", content, re.DOTALL)
    assert script is not None
    digest = b64encode(hashlib.sha256(script[1]).digest()).decode()
    headers = {
        "content-security-policy": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(content, media_type="text/html", headers=headers)
