"""Django on gunicorn: reports each request as Django's API shows it."""

import json
import os
import threading

from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import re_path

LOCK = threading.Lock()


def text(value):
    """Return the bytes of a WSGI value as hexadecimal digits."""
    return None if value is None else value.encode("utf-8", "surrogateescape").hex()


def raw(value):
    return None if value is None else value.encode("latin-1", "replace").hex()


def view(request):
    length, complete = 0, True
    try:
        declared = request.META.get("CONTENT_LENGTH")
        while piece := request.META["wsgi.input"].read(65536):
            length += len(piece)
        # A chunked body has no length in advance.
        complete = "HTTP_TRANSFER_ENCODING" in request.META or length == int(declared or 0)
    except Exception:
        complete = False
    try:
        host = request.get_host()
    except DisallowedHost:
        # Django rejects this host in `get_host`, but the header is still available to the application.
        host = request.META.get("HTTP_HOST")
    seen = {
        "case": request.META.get("HTTP_X_CASE"),
        "id": request.META.get("HTTP_X_REQUEST_ID"),
        "method": request.method,
        "path": text(request.path),
        "target": request.META.get("RAW_URI"),
        "host": host,
        "key": raw(request.META.get("HTTP_X_API_KEY")),
        "tenant": raw(request.META.get("HTTP_X_TENANT")),
        "sid": text(request.COOKIES.get("sid")),
        "routed": request.META.get("HTTP_X_ROUTED"),
        "headers": sorted((name, value) for name, value in request.META.items() if name.startswith("HTTP_")),
        "length": length,
        "complete": complete,
    }
    with LOCK, open(os.path.join(os.environ["SEEN"], f"{request.META['SERVER_PORT']}.log"), "a") as log:
        log.write(json.dumps(seen) + "\n")
    return JsonResponse({"case": seen["case"], "path": seen["path"], "length": length})


settings.configure(
    ROOT_URLCONF=(re_path("", view),), ALLOWED_HOSTS=["*"], SECRET_KEY="suites", MIDDLEWARE=[], LOGGING_CONFIG=None, USE_TZ=True
)
application = get_wsgi_application()
