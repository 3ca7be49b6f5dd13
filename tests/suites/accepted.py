"""Accepted differences, each with its reason. An entry that matches no difference fails the suite.

Patterns have the syntax of `fnmatch` and match the text `group: name` of a case.
"""

ALL = ("nginx", "haproxy", "envoy")

# Requests that a peer rejects and Sluicegate forwards: pattern, peers, reason.
STRICTNESS = [
    # Methods
    ("method: [!a-z]*", ("envoy",), "RFC 9110 9.1: any token is a valid method, which Sluicegate forwards and limits as received; Envoy accepts only the methods that it knows"),
    ("method: [1G]*", ("nginx",), "RFC 9110 9.1: any token is a valid method; nginx accepts only letters, hyphens and underscores"),
    ("method: PRI", ("haproxy",), "RFC 9110 9.1: PRI is a valid method; with HTTP/1.1 in the request line, it does not begin the HTTP/2 preface"),
    # Targets
    ("target: /..", ("nginx",), "RFC 3986 5.2.4: Sluicegate removes dot segments above the root before it matches and forwards the path"),
    ("target: /../*", ("nginx",), "RFC 3986 5.2.4: as above"),
    ("target: /%2e%2e/admin/one", ("nginx",), "RFC 3986 5.2.4: as above"),
    ("target: 1,000 dot segments", ("nginx",), "RFC 3986 5.2.4: as above"),
    ("target: http://host.test/../admin/one", ("nginx",), "RFC 3986 5.2.4: as above"),
    ("target: *#*", ALL, "RFC 9110 7.1: Sluicegate removes the fragment before it matches and forwards the target"),
    ("target: /\\xc3\\xa9", ("haproxy", "envoy"), "Sluicegate percent-encodes UTF-8 before it matches and forwards the path"),
    ("target: http://*", ("haproxy",), "RFC 9112 3.2.2: the host of an absolute target replaces Host; HAProxy requires both to be equal"),
    ("target: http://api.test[?]a", ("envoy",), "RFC 9110 4.2.1: an empty path means /; Envoy has no route for it and responds with 404"),
    ("target: http://host.test[?]@api.test/one", ("envoy",), "RFC 9110 4.2.1: as above; Sluicegate forwards the query as received"),
    ("target: http://api.test:/one", ("envoy",), "RFC 3986 3.2.3: a port may be empty"),
    ("target: http://api.test:99999/one", ("envoy",), "routes and limits ignore the port, and Sluicegate forwards it as received"),
    ("target: https://*", ("envoy",), "Sluicegate does not trust the scheme of a target: X-Forwarded-Proto is the scheme of the connection"),
    # Hosts
    ("host: HTTP/1.0 without Host", ("envoy",), "RFC 9112 3.2: only HTTP/1.1 requires Host; without Host, a request matches only routes for any host"),
    ("host: \\thost.test\\t", ("nginx",), "RFC 9110 5.5: spaces and tabs around a value are not part of it, and Sluicegate does not forward them"),
    # Aliases of header names: Envoy is configured to reject names with underscores.
    ("name: *, *underscore*", ("envoy",), "Sluicegate removes a header that some servers could take for one that it reads, and forwards all others"),
    ("name: *, HTTP_ before, *", ("envoy",), "RFC 9110 5.6.2: names with underscores are valid, and this name is a separate header"),
    ("twice: Authorization alias", ("envoy",), "RFC 9110 5.6.2: the alias is a separate header, and no limit reads Authorization here"),
    ("twice: X_*", ("envoy",), "Sluicegate removes the alias"),
    ("twice: Script_Name", ("envoy",), "RFC 9110 5.6.2: a separate header, which Sluicegate does not read"),
    ("host: X_Forwarded_Host", ("envoy",), "Sluicegate removes the alias"),
    ("connection: * in an alias", ("envoy",), "Connection_ is a separate header, so Sluicegate removes no headers that it names"),
    ("name: name of 10,000 bytes*", ("haproxy",), "Sluicegate accepts headers up to max_header_size, 32 KiB; HAProxy accepts 16 KiB"),
    # Identities that no limit reads
    ("twice: Authorization *", ("nginx",), "only a limit by jwt reads Authorization and rejects two of them; on other routes, both are forwarded as received"),
    # Framing
    ("framing: coding *, length covers it", ("nginx", "envoy"), "RFC 9112 6.3: chunked framing takes precedence; Sluicegate removes Content-Length and closes the connection"),
    ("framing: coding *, chunks cover it", ("nginx", "envoy"), "RFC 9112 6.3: as above"),
    ("framing: coding of a GET", ("nginx", "envoy"), "RFC 9112 6.3: as above"),
    ("framing: coding tab *, no length", ("nginx",), "RFC 9110 5.5: tabs around a value are not part of it; Sluicegate forwards exactly one framing"),
    ("framing: length tabs*", ("nginx",), "RFC 9110 5.5: tabs around a value are not part of it; Sluicegate writes a new Content-Length"),
    ("framing: name of the length, underscore, *", ("envoy",), "Sluicegate removes the alias"),
    ("framing: length twice, equal", ("nginx", "envoy"), "RFC 9112 6.3: equal lengths count as one, and Sluicegate forwards one"),
    # Connections
    ("connection: host *", ("envoy",), "Sluicegate removes the headers that Connection names, except Host"),
    ("connection: x-forwarded-for *", ("envoy",), "Sluicegate replaces X-Forwarded-For"),
    ("expect: Expect twice", ("nginx",), "RFC 9110 5.3: equal expectations form a valid list; Sluicegate forwards none of them"),
    ("upgrade: *", ("envoy",), "RFC 9110 7.8: Sluicegate ignores and removes Upgrade on routes that do not allow upgrades"),
    ("pipeline: no Host, then GET", ("nginx", "envoy"), "the framing of the rejected request is unambiguous, so Sluicegate serves the next request on the connection"),
]

# Requests in which the application reads another identity than the one that was limited: pattern, applications, reason.
DECISIONS = [
    ("target: *%[8cef]*", ("django", "node", "node-lenient"), "these applications leave bytes that are not UTF-8 percent-encoded or encode them again, so they see another path"),
    ("cookie: S*", ("nginx",), "$cookie_NAME ignores the case of names; for other servers, SID is another cookie than sid"),
    ("value: cookie, capitals", ("nginx",), "as above"),
    ("cookie: sid= evil", ("go",), "Go keeps the space in the value: two of its sessions may share one bucket, but one session never has two buckets"),
]
