"""FastAPI applications with a login: `uvicorn logins_fastapi:NAME`. The only password is `right`."""

from typing import Annotated

from fastapi import FastAPI, Form
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from pydantic import BaseModel

PAGE = """<!doctype html><title>Log in</title><p id=said>{said}</p>
<form method=post action=/login><input name=username><input name=password type=password><button>Log in</button></form>"""

json, form, redirect = FastAPI(), FastAPI(), FastAPI()
attempts = []


class Credentials(BaseModel):
    username: str
    password: str


def is_right(username, password):
    attempts.append(username)
    return password == "right"


@json.post("/login")
def log_in(credentials: Credentials):
    if is_right(credentials.username, credentials.password):
        return {"user": credentials.username}
    return JSONResponse({"detail": "wrong password"}, 401)


@form.post("/login")
def log_in_by_form(username: Annotated[str, Form()], password: Annotated[str, Form()]):
    if is_right(username, password):
        return HTMLResponse(f"<p id=said>Hello {username}</p>")
    return HTMLResponse(PAGE.format(said="wrong password"), 401)


@redirect.post("/login")
def log_in_and_redirect(username: Annotated[str, Form()], password: Annotated[str, Form()]):
    if is_right(username, password):
        return RedirectResponse("/home", 303)
    return HTMLResponse(PAGE.format(said="wrong password"), 401)


for app in (json, form, redirect):
    app.get("/attempts")(lambda: attempts)
for app in (form, redirect):
    app.get("/login")(lambda: HTMLResponse(PAGE.format(said="Please log in")))
