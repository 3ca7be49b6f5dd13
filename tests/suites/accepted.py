"""Accepted differences, each with its reason. An entry that matches no difference fails the suite.

Patterns have the syntax of `fnmatch` and match the text `group: name` of a case.
"""

ALL = ("nginx", "haproxy", "envoy")

# Requests that a peer rejects and Sluicegate forwards: pattern, peers, reason.
STRICTNESS = [
    # Methods
    ("method: [!a-z]*", ("envoy",), "RFC 9110 9.1: a method is any token; it is forwarded and limited as it came; Envoy knows a list"),
    ("method: [1G]*", ("nginx",), "RFC 9110 9.1: a method is any token; nginx takes letters, hyphens and underscores"),
    ("method: PRI", ("haproxy",), "RFC 9110 9.1: any token; with HTTP/1.1 behind it, it is no preface"),
    # Targets
    ("target: /..", ("nginx",), "RFC 3986 5.2.4: dot segments above the root are removed, before the path is matched and forwarded"),
    ("target: /../*", ("nginx",), "RFC 3986 5.2.4: as above"),
    ("target: /%2e%2e/admin/one", ("nginx",), "RFC 3986 5.2.4: as above"),
    ("target: 1,000 dot segments", ("nginx",), "RFC 3986 5.2.4: as above"),
    ("target: http://host.test/../admin/one", ("nginx",), "RFC 3986 5.2.4: as above"),
    ("target: *#*", ALL, "RFC 9110 7.1: a fragment is cut off, before the target is matched and forwarded"),
    ("target: /\\xc3\\xa9", ("haproxy", "envoy"), "UTF-8 is percent-encoded before the path is matched and forwarded"),
    ("target: http://*", ("haproxy",), "RFC 9112 3.2.2: the host of an absolute target counts and is forwarded as Host; HAProxy wants both equal"),
    ("target: http://api.test[?]a", ("envoy",), "RFC 9110 4.2.1: the empty path is /; a 404 of Envoy's routes"),
    ("target: http://host.test[?]@api.test/one", ("envoy",), "RFC 9110 4.2.1: as above; the query is forwarded as it came"),
    ("target: http://api.test:/one", ("envoy",), "RFC 3986 3.2.3: a port may be empty"),
    ("target: http://api.test:99999/one", ("envoy",), "the port is no part of a route or limit, and is forwarded as it came"),
    ("target: https://*", ("envoy",), "the scheme of a target is not trusted: X-Forwarded-Proto is that of the connection"),
    # Hosts
    ("host: HTTP/1.0 without Host", ("envoy",), "RFC 9112 3.2: only HTTP/1.1 must have one; it has only routes for any host"),
    ("host: \\thost.test\\t", ("nginx",), "RFC 9110 5.5: spaces and tabs around a value are no part of it, and are not forwarded"),
    # Aliases of header names: Envoy is configured to reject names with underscores.
    ("name: *, *underscore*", ("envoy",), "the alias is removed if it folds into what the gateway reads; other names are forwarded"),
    ("name: *, HTTP_ before, *", ("envoy",), "names with underscores are valid (RFC 9110 5.6.2) and another header"),
    ("twice: Authorization alias", ("envoy",), "RFC 9110 5.6.2: another header; no limit reads Authorization here"),
    ("twice: X_*", ("envoy",), "the alias is removed"),
    ("twice: Script_Name", ("envoy",), "RFC 9110 5.6.2: another header, which the gateway does not read"),
    ("host: X_Forwarded_Host", ("envoy",), "the alias is removed"),
    ("connection: * in an alias", ("envoy",), "Connection_ is another header; it names nothing"),
    ("name: name of 10,000 bytes*", ("haproxy",), "a head has up to max_header_size, 32 KiB; HAProxy has 16 KiB"),
    # Identities that no limit reads
    ("twice: Authorization *", ("nginx",), "only a limit by jwt reads it, and rejects two; elsewhere both are forwarded as they came"),
    # Framing
    ("framing: coding *, length covers it", ("nginx", "envoy"), "RFC 9112 6.3: chunks count; the length is removed and the connection ends"),
    ("framing: coding *, chunks cover it", ("nginx", "envoy"), "RFC 9112 6.3: as above"),
    ("framing: coding of a GET", ("nginx", "envoy"), "RFC 9112 6.3: as above"),
    ("framing: coding tab *, no length", ("nginx",), "RFC 9110 5.5: tabs around a value are no part of it; one framing is forwarded"),
    ("framing: length tabs*", ("nginx",), "RFC 9110 5.5: tabs around a value are no part of it; the length is written anew"),
    ("framing: name of the length, underscore, *", ("envoy",), "the alias is removed"),
    ("framing: length twice, equal", ("nginx", "envoy"), "RFC 9112 6.3: equal lengths are one, and one is forwarded"),
    # Connections
    ("connection: host *", ("envoy",), "what Connection names is removed, except Host, which stays"),
    ("connection: x-forwarded-for *", ("envoy",), "the gateway writes X-Forwarded-For anew"),
    ("expect: Expect twice", ("nginx",), "RFC 9110 5.3: a list of equal expectations; none is forwarded"),
    ("upgrade: *", ("envoy",), "RFC 9110 7.8: Upgrade is ignored and removed where no route takes it"),
    ("pipeline: no Host, then GET", ("nginx", "envoy"), "the framing of the rejected request is clear: the next one on the connection is served"),
]

# Requests in which the application reads another identity than the one that was limited: pattern, applications, reason.
DECISIONS = [
    ("target: *%[8cef]*", ("django", "node", "node-lenient"), "octets that are no UTF-8: these leave or write them encoded, so the name is another for them"),
    ("cookie: S*", ("nginx",), "$cookie_NAME ignores case, other servers do not: SID is another cookie"),
    ("value: cookie, capitals", ("nginx",), "as above"),
    ("cookie: sid= evil", ("go",), "Go keeps the space: for it two sessions have one bucket, never one session two"),
]
