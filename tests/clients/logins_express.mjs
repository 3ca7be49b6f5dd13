// Express applications with a login: `logins_express.mjs PORT NAME`. The only password is `right`.

import express from "express";

const [port, name] = process.argv.slice(2);
const attempts = [];
const page = (said) => `<!doctype html><title>Log in</title><p id=said>${said}</p>
<form method=post action=/login><input name=username><input name=password type=password><button>Log in</button></form>`;

function isRight({ username, password } = {}) {
  attempts.push(username ?? null);
  return password === "right";
}

const answers = {
  json: (request, response) =>
    isRight(request.body) ? response.json({ user: request.body.username }) : response.status(401).json({ detail: "wrong password" }),
  form: (request, response) =>
    isRight(request.body) ? response.send(`<p id=said>Hello ${request.body.username}</p>`) : response.status(401).send(page("wrong password")),
  redirect: (request, response) =>
    isRight(request.body) ? response.redirect("/home") : response.status(401).send(page("wrong password")),
};

const app = express();
app.use(name === "json" ? express.json() : express.urlencoded({ extended: true }));
app.get("/attempts", (_, response) => response.json(attempts));
app.get("/login", (_, response) => response.send(page("Please log in")));
app.post("/login", answers[name]);
app.listen(+port, "127.0.0.1");
