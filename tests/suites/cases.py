"""The corpus: mutations of HTTP/1.1 requests, generated from tables.

Each request with an ambiguous framing contains a hidden second request to `/smuggled`, which must not reach an application.
"""

from dataclasses import dataclass

# A placeholder. It is replaced with the number of the case before the case is sent.
MARK = b"@CASE@"
HIDDEN = b"GET /smuggled HTTP/1.1\r\nHost: api.test\r\nX-Case: @CASE@\r\n\r\n"
BASE = (b"X-Api-Key: key-alice", b"X-Tenant: acme", b"Cookie: sid=one")


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    data: bytes
    # The number of requests that the case contains, if it is read strictly.
    requests: int = 1
    # Whether every gateway must forward the case to every application.
    honest: bool = False
    method: bytes = b"GET"
    # Whether bytes may remain after the request, so that the next request requires another connection.
    separate: bool = False

    @property
    def id(self):
        return f"{self.group}: {self.name}"

    @property
    def alone(self):
        """Whether the next request requires another connection, because some servers end the headers before the last line."""
        return self.separate or b"\r\n\n" in self.data or b"\n\n" in self.data


def request(method=b"GET", target=b"/one", version=b"HTTP/1.1", host=(b"Host: api.test",), lines=BASE, body=b""):
    head = [b" ".join(part for part in (method, target, version) if part is not None), *host, b"X-Case: " + MARK, *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def shown(data):
    return data.decode("latin-1").encode("unicode_escape").decode() if isinstance(data, bytes) else data


def honest():
    post = (b"Content-Length: 5",)
    chunked = (b"Transfer-Encoding: chunked",)
    table = {
        "GET": request(),
        "GET with query": request(target=b"/one?a=b&c=%20d&e=f+g"),
        "GET with lower-case header names": request(lines=(b"x-api-key: key-alice", b"x-tenant: acme", b"cookie: sid=one")),
        "GET without identity": request(lines=()),
        "GET with several cookies": request(lines=(b"Cookie: a=1; sid=one; b=2",)),
        "GET with host and port": request(host=(b"Host: api.test:8080",)),
        "GET of a long path": request(target=b"/" + b"segment/" * 100),
        "GET with long header": request(lines=(b"X-Long: " + b"v" * 4000,)),
        "GET with 40 headers": request(lines=tuple(b"X-Header-%d: v" % number for number in range(40))),
        "GET of an encoded space": request(target=b"/a%20b"),
        "GET of UTF-8": request(target=b"/%C3%A9"),
        "GET of tilde, colon and at": request(target=b"/~user/a:b@c"),
        "GET on the admin path": request(target=b"/admin/one"),
        "GET of another host": request(host=(b"Host: host.test",)),
        "GET of another tenant": request(host=(b"Host: host.test",), lines=(b"X-Tenant: gold",)),
        "HTTP/1.0 with Host": request(version=b"HTTP/1.0"),
        "OPTIONS": request(b"OPTIONS"),
        "DELETE": request(b"DELETE"),
        "POST with length": request(b"POST", lines=(*BASE, *post), body=b"hello"),
        "POST in chunks": request(b"POST", lines=(*BASE, *chunked), body=b"5\r\nhello\r\n0\r\n\r\n"),
        "POST in two chunks": request(b"POST", lines=(*BASE, *chunked), body=b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"),
        "POST of 100,000 bytes": request(b"POST", lines=(b"Content-Length: 100000",), body=b"x" * 100_000),
        "PUT": request(b"PUT", lines=(*BASE, *post), body=b"hello"),
        "PATCH": request(b"PATCH", lines=(*BASE, *post), body=b"hello"),
        "Connection: keep-alive": request(lines=(*BASE, b"Connection: keep-alive")),
        "empty POST": request(b"POST", lines=(*BASE, b"Content-Length: 0")),
    }
    for name, data in table.items():
        yield Case("honest", name, data, honest=True)
    yield Case("honest", "HEAD", request(b"HEAD"), honest=True, method=b"HEAD")
    yield Case("honest", "two pipelined", request() + request(target=b"/two"), requests=2, honest=True)


def methods():
    names = [b"get", b"Get", b"gET", b"post", b"GEt", b"HEAd", b"PURGE", b"PROPFIND", b"QUERY", b"M-SEARCH", b"FOO", b"G", b"G" * 100]
    names += [b"TRACE", b"TRACK", b"DEBUG", b"PRI", b"GET\x00", b"G\x00ET", b"GET\x0b", b"\x00GET", b"G\xc9T", b"GET:", b"G/T", b"(GET)", b'"GET"']
    names += [b"G@T", b"GET,POST", b"GET{", b"G$T", b"G'T", b"G!T", b"G_T", b"123", b"-", b""]
    for name in names:
        yield Case("method", shown(name) or "empty", request(name))
    yield Case("method", "GET with X-HTTP-Method-Override", request(lines=(*BASE, b"X-HTTP-Method-Override: DELETE")))
    for name in [b"post", b"Post", b"poST"]:
        yield Case("method", f"{shown(name)} with a body", request(name, lines=(*BASE, b"Content-Length: 5"), body=b"hello"))
    yield Case("method", "CONNECT of an authority", request(b"CONNECT", b"api.test:80"))
    yield Case("method", "CONNECT of a path", request(b"CONNECT", b"/one"))
    for name, gap in [("two spaces", b"  "), ("tab", b"\t"), ("vertical tab", b"\x0b"), ("form feed", b"\x0c"), ("CR", b"\r")]:
        line = b"GET" + gap + b"/one HTTP/1.1"
        yield Case("request line", f"{name} behind the method", request(line, None, None))
        yield Case("request line", f"{name} behind the target", request(b"GET /one" + gap + b"HTTP/1.1", None, None))
        yield Case("request line", f"{name} behind the version", request(b"GET /one HTTP/1.1" + gap, None, None))
        yield Case("request line", f"{name} before the method", request(gap + b"GET /one HTTP/1.1", None, None))
    plain = request()
    yield Case("request line", "CR LF before it", b"\r\n" + plain)
    yield Case("request line", "two CR LF before it", b"\r\n\r\n" + plain)
    yield Case("request line", "LF before it", b"\n" + plain)
    yield Case("request line", "CR before it", b"\r" + plain)
    yield Case("request line", "NUL before it", b"\0" + plain)
    yield Case("request line", "byte order mark before it", b"\xef\xbb\xbf" + plain)
    yield Case("request line", "ends in LF", plain.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\n", 1))
    yield Case("request line", "ends in CR", plain.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r", 1))
    yield Case("request line", "all lines end in LF", plain.replace(b"\r\n", b"\n"))
    yield Case("request line", "head ends in LF LF", plain[:-4] + b"\n\n")
    yield Case("request line", "head ends in CR LF LF", plain[:-2] + b"\n")
    yield Case("request line", "head ends in LF CR LF", plain[:-4] + b"\n\r\n")
    yield Case("request line", "head ends in CR CR", plain[:-4] + b"\r\r", requests=0)


def targets():
    names = [b"//", b"//one", b"/one//two", b"///", b"/.", b"/..", b"/./one", b"/x/../admin/one", b"/../admin/one", b"/admin/../one", b"/one/.", b"/one/.."]
    names += [b"/x/..", b"/../../..", b"/...", b"/%2e/one", b"/x/%2e%2e/admin/one", b"/x/.%2e/admin/one", b"/x/%2E./admin/one", b"/%2e%2e/admin/one"]
    names += [b"/one//../admin/one", b"/x//..//admin/one", b"/admin//one", b"//admin//one", b"/one%2F%2Ftwo", b"/one%2F/two", b"/%2Fadmin/one", b"/one//"]
    names += [b"/%252e%252e/admin/one", b"/x%2f..%2fadmin/one", b"/x/..%2fadmin/one", b"/admin%2fone", b"/admin%2Fone", b"/admin%5cone", b"/admin\\one"]
    names += [b"/x/..\\admin/one", b"/x\\..\\admin\\one", b"\\admin\\one", b"/%61dmin/one", b"/%41dmin/one", b"/ADMIN/one", b"/Admin/one", b"/admin;x/one"]
    names += [b"/admin/one;x=1", b"/;/admin/one", b"/admin;/one", b"/x/..;/admin/one", b"/.;/admin/one", b"/admin%3b/one", b"/one%3Fa=b", b"/one%23a", b"/one#a"]
    names += [b"/one#/../admin/one", b"/one?#a", b"/one?a=b?c", b"/one?a=%00", b"/one?a=\x01", b"/one?a=\xff", b"/one?a=%", b"/one?a=%zz", b"/one?", b"/one??"]
    names += [b"/one?a=b c", b"/one%", b"/one%1", b"/one%zz", b"/one%0", b"/one%00", b"/one%00.html", b"/one%0a", b"/one%0d%0aX-Tenant:evil", b"/one%09", b"/one%20"]
    names += [b"/one%7f", b"/one%80", b"/one%ff", b"/one%c0%af", b"/one%c0%ae", b"/%c0%ae%c0%ae/admin/one", b"/%e0%80%af", b"/one%u002f", b"/one\xff"]
    names += [b"/\xc3\xa9", b"/\xc0\xae", b"/one\x00", b"/one\x01", b"/one\x09", b"/one\x7f", b"/one\x0b", b"/one two", b" /one", b"/one "]
    names += [b"/%3a", b"/%3A%40%21", b"/a%2Bb", b"/a+b", b"/a%26b", b"/a%3Db", b"/%7Eone", b"/~one", b'/one"', b"/one<", b"/one>", b"/one`", b"/one{", b"/one|", b"/one^"]
    names += [b"/one%22", b"/one%25", b"/%25", b"/%2561dmin/one", b"/[one]", b"/one*", b"/one'", b"/one(", b"/admin", b"/admin/", b"/admin/.", b"/adminx", b"/one:80"]
    names += [b"one", b"", b"*", b"?", b"?a", b"#", b".", b"..", b"./one", b"../one", b";", b"%2fone", b"%2Fadmin/one", b"admin/one", b"@/one", b":80/one"]
    names += [b"http://api.test/one", b"HTTP://api.test/one", b"hTTp://API.TEST/one", b"https://api.test/one", b"ftp://api.test/one", b"http:/one", b"http:one"]
    names += [b"http:///one", b"http://", b"http://api.test", b"http://api.test?a", b"http://api.test#a", b"http://api.test/", b"http://api.test:80/one"]
    names += [b"http://api.test:/one", b"http://api.test:x/one", b"http://api.test:99999/one", b"http://api.test./one", b"http://host.test/one"]
    names += [b"http://HOST.test/one", b"http://user@host.test/one", b"http://user:pass@host.test/one", b"http://api.test@host.test/one", b"http://host.test\\@api.test/one"]
    names += [b"http://host.test%2f@api.test/one", b"http://host.test/../admin/one", b"http://host.test//admin/one", b"http://[::1]/one", b"http://[::1/one"]
    names += [b"http://host%2etest/one", b"http://host.test%00/one", b"http:\\\\host.test\\one", b"http://host.test\\one", b"//host.test/one", b"///host.test/one"]
    names += [b"http://api.test/http://host.test/one", b"api.test", b"api.test:80", b"javascript:alert(1)", b"mailto:a@host.test", b"urn:one", b"ws://host.test/one"]
    names += [b"http://host.test#@api.test/one", b"http://host.test?@api.test/one", b"http://a@b@host.test/one", b"http://host.test /one"]
    for name in names:
        yield Case("target", shown(name) or "empty", request(target=name))
    for length in [4_000, 8_000, 8_300, 20_000, 70_000]:
        yield Case("target", f"{length} bytes", request(target=b"/" + b"a" * length))
        yield Case("target", f"query of {length} bytes", request(target=b"/one?" + b"a" * length))
    yield Case("target", "1,000 dot segments", request(target=b"/x/" + b"../" * 1000 + b"admin/one"))
    yield Case("target", "OPTIONS *", request(b"OPTIONS", b"*"))
    yield Case("target", "POST *", request(b"POST", b"*", lines=(*BASE, b"Content-Length: 0")))


def hosts():
    names = [b"", b" ", b"api.test:80", b"api.test:", b"api.test:x", b"api.test:99999", b"api.test:80:80", b"api.test.", b"api.test..", b".api.test", b"api..test"]
    names += [b"API.TEST", b"HOST.TEST", b"Host.Test.", b"host.test:8080", b"host.test.:8080", b"user@host.test", b"user:pass@host.test", b"host.test@api.test"]
    names += [b"host.test/", b"host.test/one", b"host.test?", b"host.test#", b"host.test\\", b"host test", b" host.test", b"host.test ", b"\thost.test\t"]
    names += [b"host.test,api.test", b"host.test, api.test", b"host.test;api.test", b"host.test\x00", b"host.test\x00.api.test", b"host.test\x0b", b"host.test\x7f"]
    names += [b"host.test\xff", b"h\xc3\xb6st.test", b"host%2etest", b"%68ost.test", b"host_test", b"-host.test", b"127.0.0.1", b"127.1", b"0x7f.1", b"[::1]", b"[::1]:80"]
    names += [b"[::1", b"::1", b"[::1]x", b"[::ffff:127.0.0.1]", b"[fe80::1%25lo]", b"[v1.x]", b"http://host.test", b"(host.test)", b"host.test\"", b"*", b"*.test"]
    names += [b"a" * 63 + b".test", b"a" * 64 + b".test", b".".join([b"a" * 60] * 5), b"xn--hst-sna.test", b"host.test:+80", b"host.test:0", b"host.test:-1", b"host.test:0x50"]
    for name in names:
        label = shown(name) if len(name) < 60 else f"{len(name)} bytes"
        yield Case("host", label.replace(" ", "␠") or "empty", request(host=(b"Host: " + name,)))
    lines = {
        "missing": (),
        "twice, equal": (b"Host: api.test", b"Host: api.test"),
        "twice, different": (b"Host: api.test", b"Host: host.test"),
        "twice, different, reverse": (b"Host: host.test", b"Host: api.test"),
        "twice, first empty": (b"Host:", b"Host: host.test"),
        "twice, other case of the name": (b"Host: api.test", b"hOST: host.test"),
        "space before the colon": (b"Host : host.test",),
        "space before the colon, second": (b"Host: api.test", b"Host : host.test"),
        "leading space, second": (b"Host: api.test", b" Host: host.test"),
        "folded": (b"Host:", b" host.test"),
        "folded, continued": (b"Host: api.test", b" host.test"),
        "X-Forwarded-Host": (b"Host: api.test", b"X-Forwarded-Host: host.test"),
        "X_Forwarded_Host": (b"Host: api.test", b"X_Forwarded_Host: host.test"),
        "Forwarded": (b"Host: api.test", b"Forwarded: host=host.test"),
        "X-Host": (b"Host: api.test", b"X-Host: host.test"),
        "no space": (b"Host:host.test",),
        "name in capitals": (b"HOST: host.test",),
        "LF and another": (b"Host: api.test\nHost: host.test",),
        "CR and another": (b"Host: api.test\rHost: host.test",),
        "NUL in the name": (b"Host: api.test", b"Host\x00: host.test"),
    }
    for name, host in lines.items():
        yield Case("host", name, request(host=host))
    for name in [b"http://host.test/one", b"http://api.test/one", b"http://HOST.TEST:80/one", b"//host.test/one"]:
        for label, host in [("without Host", ()), ("with empty Host", (b"Host:",)), ("with two Hosts", (b"Host: api.test", b"Host: host.test")), ("with bad Host", (b"Host: a b",))]:
            yield Case("host", f"{shown(name)} {label}", request(target=name, host=host))
    for label, host in [("without Host", ()), ("with two Hosts", (b"Host: api.test", b"Host: host.test")), ("with empty Host", (b"Host:",))]:
        yield Case("host", f"HTTP/1.0 {label}", request(version=b"HTTP/1.0", host=host))
    yield Case("host", "HTTP/1.0 with absolute target", request(target=b"http://host.test/one", version=b"HTTP/1.0", host=()))


# For each kind of identity: the header, a value with a forged identity, and the header line of a valid request.
IDENTITIES = {
    "key": (b"X-Api-Key", b"key-evil", b"X-Api-Key: key-alice"),
    "tenant": (b"X-Tenant", b"gold", b"X-Tenant: acme"),
    "cookie": (b"Cookie", b"sid=evil", b"Cookie: sid=one"),
}


def spellings(name):
    parts = name.split(b"-")
    yield "lower case", name.lower()
    yield "capitals", name.upper()
    for label, sign in [("underscores", b"_"), ("dots", b"."), ("exclamation marks", b"!"), ("tildes", b"~"), ("spaces", b" "), ("slashes", b"/"), ("two hyphens", b"--")]:
        if len(parts) > 1:
            yield label, sign.join(parts)
    if len(parts) > 2:
        yield "underscore and hyphen", parts[0] + b"_" + parts[1] + b"-" + parts[2]
    yield "space before the colon", name + b" "
    yield "tab before the colon", name + b"\t"
    yield "vertical tab before the colon", name + b"\x0b"
    yield "leading space", b" " + name
    yield "leading tab", b"\t" + name
    yield "NUL behind", name + b"\0"
    yield "NUL inside", name[:2] + b"\0" + name[2:]
    yield "CR behind", name + b"\r"
    yield "CR before", b"\r" + name
    yield "LF behind", name + b"\n"
    yield "LF before", b"\n" + name
    yield "non-ASCII inside", name[:2] + b"\xc3\xa9" + name[2:]
    yield "no-break space behind", name + b"\xa0"
    yield "Kelvin sign", name.replace(b"k", b"\xe2\x84\xaa").replace(b"K", b"\xe2\x84\xaa") if b"k" in name.lower() else name + b"\xe2\x84\xaa"
    yield "hyphen behind", name + b"-"
    yield "underscore behind", name + b"_"
    yield "quotes", b'"' + name + b'"'
    yield "colon before", b":" + name
    yield "HTTP_ before", b"HTTP_" + name.replace(b"-", b"_")
    yield "DEL inside", name[:2] + b"\x7f" + name[2:]


def names():
    for identity, (name, evil, line) in IDENTITIES.items():
        others = tuple(each for each in BASE if each != line)
        for label, spelling in spellings(name):
            alias = spelling + b": " + evil
            yield Case("name", f"{identity}, {label}, alone", request(lines=(*others, alias)))
            # Send the alias after the valid header, then before it.
            yield Case("name", f"{identity}, {label}, behind", request(lines=(*others, line, alias)))
            yield Case("name", f"{identity}, {label}, before", request(lines=(alias, *others, line)))
    for label, line in {
        "empty name": b": gold",
        "no colon": b"X-Tenant gold",
        "only a name": b"X-Tenant",
        "only a colon": b":",
        "two colons": b"X-Tenant:: gold",
        "equals sign": b"X-Tenant= gold",
        "semicolon": b"X-Tenant; gold",
        "line of a space": b" ",
        "line of a tab": b"\t",
        "line of a NUL": b"\0",
        "line of an FF": b"\xff",
        "name of 10,000 bytes": b"X-" + b"n" * 10_000 + b": v",
        "name of 70,000 bytes": b"X-" + b"n" * 70_000 + b": v",
        "parenthesis": b"X(Tenant): gold",
        "at sign": b"X@Tenant: gold",
        "comma": b"X,Tenant: gold",
        "pseudo header": b":path: /admin/one",
        "pseudo header of the authority": b":authority: host.test",
    }.items():
        yield Case("name", label, request(lines=(*BASE, line)))
        yield Case("name", f"{label}, first", request(host=(line, b"Host: api.test")))
    for count in [90, 101, 150, 2000]:
        yield Case("name", f"{count} lines", request(lines=(*BASE, *(b"X-%d: v" % number for number in range(count)))))


def values():
    def spelled(evil):
        yield "leading spaces", b"   " + evil
        yield "trailing spaces", evil + b"   "
        yield "tabs around", b"\t" + evil + b"\t"
        yield "space inside", evil[:-2] + b" " + evil[-2:]
        yield "tab inside", evil[:-2] + b"\t" + evil[-2:]
        yield "no space", None
        for label, sign in [("NUL", b"\0"), ("CR", b"\r"), ("LF", b"\n"), ("vertical tab", b"\x0b"), ("form feed", b"\x0c"), ("DEL", b"\x7f"), ("0x01", b"\x01"), ("0x1f", b"\x1f")]:
            yield f"{label} inside", evil[:-2] + sign + evil[-2:]
            yield f"{label} behind", evil + sign
            yield f"{label} before", sign + evil
        for label, sign in [("obs-text", b"\xe9"), ("UTF-8", b"\xc3\xa9"), ("no-break space", b"\xa0"), ("NEL", b"\x85"), ("overlong NUL", b"\xc0\x80")]:
            yield f"{label} behind", evil + sign
            yield f"{label} before", sign + evil
        yield "comma", evil + b",other"
        yield "comma and space", evil + b", other"
        yield "semicolon", evil + b";other"
        yield "quotes", b'"' + evil + b'"'
        yield "percent-encoded", evil[:-1] + b"%%%02x" % evil[-1]
        yield "plus", evil + b"+other"
        yield "capitals", evil.upper()
        yield "empty", b""
        yield "spaces only", b"   "
        yield "4,000 bytes", evil * 600
        yield "folded", b"\r\n " + evil
        yield "folded by tab", b"\r\n\t" + evil
        yield "continued", evil + b"\r\n other"
        yield "folded by LF", evil + b"\n other"
        yield "two folds", evil + b"\r\n \r\n other"

    for identity, (name, evil, line) in IDENTITIES.items():
        others = tuple(each for each in BASE if each != line)
        for label, value in spelled(evil):
            whole = name + b":" + evil if value is None else name + b": " + value
            yield Case("value", f"{identity}, {label}", request(lines=(*others, whole)))
    for identity, (name, evil, line) in IDENTITIES.items():
        others = tuple(each for each in BASE if each != line)
        second = name + b": " + evil
        yield Case("twice", f"{identity}, different", request(lines=(*others, line, second)))
        yield Case("twice", f"{identity}, different, reverse", request(lines=(*others, second, line)))
        yield Case("twice", f"{identity}, equal", request(lines=(*others, line, line)))
        yield Case("twice", f"{identity}, other case", request(lines=(*others, line, name.swapcase() + b": " + evil)))
        yield Case("twice", f"{identity}, first empty", request(lines=(*others, name + b":", second)))
        yield Case("twice", f"{identity}, second empty", request(lines=(*others, line, name + b":")))
        yield Case("twice", f"{identity}, third", request(lines=(*others, line, line, second)))
        yield Case("twice", f"{identity}, far apart", request(lines=(line, *others, second)))
    for label, pair in [("routed one first", (b"X-Tenant: gold", b"X-Tenant: acme")), ("routed one last", (b"X-Tenant: acme", b"X-Tenant: gold"))]:
        yield Case("twice", f"tenant of a route, {label}", request(host=(b"Host: host.test",), lines=pair))
    for cookie in [
        b"sid=one; sid=evil", b"sid=one;sid=evil", b"sid=one, sid=evil", b"sid=one,sid=evil", b"sid =evil", b"sid= evil", b"sid = evil", b" sid=evil", b"SID=evil",
        b"Sid=evil; sid=one", b"sid", b"sid; sid=evil", b"sid=; sid=evil", b"sid=evil;", b";sid=evil", b";;sid=evil", b"sid==evil", b"=sid=evil", b"sid=evil=x",
        b'sid="evil"', b'sid="ev;il"', b'sid="evil', b'sid=evil"', b'sid="ev\\"il"', b'sid="ev\\151l"', b"sid=ev%69l", b"s%69d=evil", b"%73id=evil", b"sid\x00=evil",
        b"sid\t=evil", b"\tsid=evil", b"sid\x0b=evil", b"sid\xa0=evil", b"\xa0sid=evil", b"sid=ev\xe9l", b"$sid=evil", b"$Version=1; sid=evil", b"sid[]=evil", b"sid[0]=evil",
        b"sid=one\tsid=evil", b"sid=one sid=evil", b"sid=one&sid=evil", b"a=b; sid=evil; c=d", b'a="; sid=evil; b="', b'a="b; sid=evil"', b"__Host-sid=evil", b"sid.=evil",
        b"sid-=evil", b"_sid=evil", b"sid=one; sid =evil", b"sid =evil; sid=one", b"sid=one;\tsid=evil", b"sid=one;\x0bsid=evil", b"sid=one;\xa0sid=evil", b"sid=one; \x00sid=evil",
        b'"sid"=evil', b"sid=one; Path=/; sid=evil", b"sid=one; ; sid=evil", b"a; sid=evil", b"a=sid=evil; sid=one", b"sid=%22evil%22", b"sid=evil\\", b"sid='evil'",
    ]:
        yield Case("cookie", shown(cookie), request(lines=(*BASE[:2], b"Cookie: " + cookie)))
    for label, lines in {
        "Authorization twice": (b"Authorization: Bearer a", b"Authorization: Bearer b"),
        "Authorization of two schemes": (b"Authorization: Bearer a", b"Authorization: Basic YTpi"),
        "Authorization folded": (b"Authorization: Bearer", b" a"),
        "Authorization alias": (b"Authorization: Bearer a", b"authorization_: Bearer b"),
        "Proxy-Authorization": (b"Proxy-Authorization: Basic YTpi",),
        "X-Forwarded-For": (b"X-Forwarded-For: 10.1.2.3",),
        "X_Forwarded_For": (b"X_Forwarded_For: 10.1.2.3",),
        "X-Real-IP": (b"X-Real-IP: 10.1.2.3",),
        "X-Request-Id": (b"X-Request-Id: mine",),
        "X_Request_Id": (b"X_Request_Id: mine",),
        "X-Request-Id twice": (b"X-Request-Id: a", b"X-Request-Id: b"),
        "X-Routed": (b"X-Routed: tenant",),
        "X_Routed": (b"X_Routed: tenant",),
        "X.Routed": (b"X.Routed: tenant",),
        "X-Original-URL": (b"X-Original-URL: /admin/one",),
        "X-Rewrite-URL": (b"X-Rewrite-URL: /admin/one",),
        "X-Accel-Redirect": (b"X-Accel-Redirect: /admin/one",),
        "Script-Name": (b"Script-Name: /admin",),
        "Script_Name": (b"Script_Name: /admin",),
        "Proxy": (b"Proxy: http://host.test",),
    }.items():
        yield Case("twice", label, request(lines=(*BASE, *lines)))


# A header with a coding, and whether some servers may take it for a Transfer-Encoding. If not, only Content-Length is valid.
CODINGS = {
    "chunked": (b"Transfer-Encoding: chunked", True),
    "Chunked": (b"Transfer-Encoding: Chunked", True),
    "CHUNKED": (b"TRANSFER-ENCODING: CHUNKED", True),
    "no space": (b"Transfer-Encoding:chunked", True),
    "tab before": (b"Transfer-Encoding:\tchunked", True),
    "tab behind": (b"Transfer-Encoding: chunked\t", True),
    "space behind": (b"Transfer-Encoding: chunked ", True),
    "vertical tab before": (b"Transfer-Encoding: \x0bchunked", True),
    "vertical tab behind": (b"Transfer-Encoding: chunked\x0b", True),
    "form feed behind": (b"Transfer-Encoding: chunked\x0c", True),
    "NUL behind": (b"Transfer-Encoding: chunked\x00", True),
    "no-break space before": (b"Transfer-Encoding: \xa0chunked", True),
    "chunked, chunked": (b"Transfer-Encoding: chunked, chunked", True),
    "chunked twice": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", True),
    "xchunked": (b"Transfer-Encoding: xchunked", True),
    "chunkedx": (b"Transfer-Encoding: chunkedx", True),
    "identity": (b"Transfer-Encoding: identity", True),
    "identity, chunked": (b"Transfer-Encoding: identity, chunked", True),
    "chunked, identity": (b"Transfer-Encoding: chunked, identity", True),
    "identity, then chunked": (b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked", True),
    "chunked, then identity": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", True),
    "gzip, chunked": (b"Transfer-Encoding: gzip, chunked", True),
    "chunked, gzip": (b"Transfer-Encoding: chunked, gzip", True),
    "gzip": (b"Transfer-Encoding: gzip", True),
    "empty": (b"Transfer-Encoding:", True),
    "comma, chunked": (b"Transfer-Encoding: ,chunked", True),
    "chunked, comma": (b"Transfer-Encoding: chunked,", True),
    "parameter": (b"Transfer-Encoding: chunked;q=1", True),
    "quotes": (b'Transfer-Encoding: "chunked"', True),
    "single quotes": (b"Transfer-Encoding: 'chunked'", True),
    "Kelvin sign": (b"Transfer-Encoding: chun\xe2\x84\xaaed", True),
    "space before the colon": (b"Transfer-Encoding : chunked", True),
    "tab before the colon": (b"Transfer-Encoding\t: chunked", True),
    "leading space": (b" Transfer-Encoding: chunked", True),
    "folded": (b"Transfer-Encoding:\r\n chunked", True),
    "folded by tab": (b"Transfer-Encoding:\r\n\tchunked", True),
    "in a folded line": (b"X-Fold: y\r\n Transfer-Encoding: chunked", True),
    "behind LF": (b"X-Fold: y\nTransfer-Encoding: chunked", True),
    "behind CR": (b"X-Fold: y\rTransfer-Encoding: chunked", True),
    "NUL in the name": (b"Transfer-Encoding\x00: chunked", True),
    "nominated": (b"Connection: transfer-encoding\r\nTransfer-Encoding: chunked", True),
    "with TE": (b"TE: chunked\r\nTransfer-Encoding: chunked", True),
    "underscore": (b"Transfer_Encoding: chunked", False),
    "dot": (b"Transfer.Encoding: chunked", False),
    "exclamation mark": (b"Transfer!Encoding: chunked", False),
    "longer name": (b"X-Transfer-Encoding: chunked", False),
    "hyphen behind the name": (b"Transfer-Encoding-: chunked", False),
    "Content-Encoding": (b"Content-Encoding: chunked", False),
    "TE alone": (b"TE: chunked", False),
    "TE: trailers": (b"TE: trailers", False),
}


def framings():
    inside = b"%x\r\n" % len(HIDDEN)
    for label, (line, framing) in CODINGS.items():
        # With chunked framing, the body ends at once. With Content-Length, the hidden request is part of the body.
        early = b"0\r\n\r\n" + HIDDEN
        # With chunked framing, the hidden request is part of the body. With Content-Length, it follows the first line of the body.
        late = inside + HIDDEN + b"\r\n0\r\n\r\n"
        for name, length, body in [("length covers it", len(early), early), ("chunks cover it", len(inside), late)]:
            if not framing and body is late:
                continue
            size = b"Content-Length: %d" % length
            yield Case("framing", f"coding {label}, {name}", request(b"POST", lines=(size, line), body=body))
            yield Case("framing", f"coding {label} first, {name}", request(b"POST", lines=(line, size), body=body))
        if framing:
            yield Case("framing", f"coding {label}, no length", request(b"POST", lines=(*BASE, line), body=b"5\r\nhello\r\n0\r\n\r\n"))
    yield Case("framing", "coding in HTTP/1.0", request(b"POST", version=b"HTTP/1.0", lines=(b"Transfer-Encoding: chunked", b"Connection: keep-alive"), body=b"0\r\n\r\n" + HIDDEN))
    yield Case("framing", "coding of a GET", request(lines=(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(HIDDEN)), body=b"0\r\n\r\n" + HIDDEN))
    after = b"hello" + HIDDEN
    whole = str(len(after)).encode()
    for label, first in {
        "twice, equal": (b"5", b"5"), "twice, short first": (b"5", whole), "twice, long first": (whole, b"5"), "twice, second empty": (whole, b""),
        "twice, first empty": (b"", whole), "twice, second bad": (whole, b"x"), "list, equal": (b"5, 5",), "list, different": (b"5, " + whole,), "list, reverse": (whole + b", 5",),
        "plus": (b"+" + whole,), "minus": (b"-" + whole,), "minus zero": (b"-0",), "hexadecimal": (b"0x5",), "octal": (b"0o5",), "leading zeros": (b"000" + whole,), "underscore": (b"1_0",),
        "fraction": (whole + b".0",), "exponent": (b"1e1",), "two numbers": (b"5 " + whole,), "trailing space": (whole + b" ",), "leading spaces": (b"   " + whole,), "tabs": (b"\t" + whole + b"\t",),
        "trailing comma": (whole + b",",), "leading comma": (b"," + whole,), "parameter": (whole + b";q=1",), "quotes": (b'"' + whole + b'"',), "empty": (b"",), "spaces": (b"   ",), "word": (b"five",),
        "full-width digit": ("５".encode(),), "2^63": (b"9223372036854775808",), "2^64": (b"18446744073709551616",), "2^64 + 5": (b"18446744073709551621",), "2^32 + 5": (b"4294967301",),
        "40 digits": (b"1" * 40,), "vertical tab behind": (whole + b"\x0b",), "NUL behind": (whole + b"\0",), "NUL inside": (whole[:1] + b"\0" + whole[1:],), "no-break space": (whole + b"\xa0",),
        "folded": (b"\r\n " + whole,), "continued": (whole[:1] + b"\r\n " + whole[1:],), "CR inside": (b"5\rX-Tenant: gold",), "LF inside": (whole + b"\nX-Tenant: gold",),
    }.items():
        lines = tuple(b"Content-Length: " + value for value in first)
        honest_five = label in ("twice, equal", "list, equal")
        yield Case("framing", f"length {label}", request(b"POST", lines=lines, body=b"hello" if honest_five else after))
        if not honest_five:
            yield Case("framing", f"length {label}, GET", request(lines=lines, body=after))
    for label, line in {
        "space before the colon": b"Content-Length : ", "tab before the colon": b"Content-Length\t: ", "leading space": b" Content-Length: ", "underscore": b"Content_Length: ",
        "dot": b"Content.Length: ", "NUL in the name": b"Content-Length\0: ", "longer name": b"X-Content-Length: ", "capitals": b"CONTENT-LENGTH: ",
    }.items():
        # Combine the invalid name with a valid Content-Length.
        yield Case("framing", f"name of the length, {label}, behind", request(b"POST", lines=(b"Content-Length: " + whole, line + b"5"), body=after))
        yield Case("framing", f"name of the length, {label}, before", request(b"POST", lines=(b"X-First: y", line + b"5", b"Content-Length: " + whole), body=after))
    yield Case("framing", "no length of a POST", request(b"POST"))
    yield Case("framing", "length 0 of a GET with bytes behind", request(lines=(b"Content-Length: 0",)) + b"junk", separate=True)
    yield Case("framing", "body shorter than its length", request(b"POST", lines=(b"Content-Length: 50",), body=b"hello"))
    yield Case("framing", "GET with a body", request(lines=(b"Content-Length: %d" % len(HIDDEN),), body=HIDDEN))
    yield Case("framing", "HEAD with a body", request(b"HEAD", lines=(b"Content-Length: %d" % len(HIDDEN),), body=HIDDEN), method=b"HEAD")
    yield Case("framing", "DELETE with a body", request(b"DELETE", lines=(b"Content-Length: %d" % len(HIDDEN),), body=HIDDEN))
    yield Case("framing", "OPTIONS with a body", request(b"OPTIONS", lines=(b"Content-Length: %d" % len(HIDDEN),), body=HIDDEN))


def chunks():
    end = b"0\r\n\r\n"
    size = b"%x" % len(HIDDEN)
    table = {
        "capital digits": b"A\r\nhellohello\r\n" + end,
        "leading zeros": b"00005\r\nhello\r\n" + end,
        "100 leading zeros": b"0" * 100 + b"5\r\nhello\r\n" + end,
        "no size": b"\r\nhello\r\n" + end,
        "LF behind the size": b"5\nhello\r\n" + end,
        "CR behind the size": b"5\rhello\r\n" + end,
        "CR CR LF behind the size": b"5\r\r\nhello\r\n" + end,
        "space behind the size": b"5 \r\nhello\r\n" + end,
        "tab behind the size": b"5\t\r\nhello\r\n" + end,
        "space before the size": b" 5\r\nhello\r\n" + end,
        "no digit": b"5g\r\nhello\r\n" + end,
        "plus": b"+5\r\nhello\r\n" + end,
        "minus": b"-5\r\nhello\r\n" + end,
        "0x": b"0x5\r\nhello\r\n" + end,
        "underscore": b"0_5\r\nhello\r\n" + end,
        "NUL behind the size": b"5\0\r\nhello\r\n" + end,
        "vertical tab behind the size": b"5\x0b\r\nhello\r\n" + end,
        "2^64": b"10000000000000000\r\nhello\r\n" + end,
        "2^64 + 5": b"10000000000000005\r\nhello\r\n" + end,
        "2^32 + 5": b"100000005\r\nhello\r\n" + end,
        "2^64 - 1": b"ffffffffffffffff\r\nhello\r\n" + end,
        "extension": b"5;a=b\r\nhello\r\n" + end,
        "extension without value": b"5;a\r\nhello\r\n" + end,
        "extension in quotes": b'5;a="b;c"\r\nhello\r\n' + end,
        "extension with CR LF in quotes": b'5;a="\r\nhello"\r\nhello\r\n' + end,
        "extension with spaces": b"5 ; a = b\r\nhello\r\n" + end,
        "empty extension": b"5;\r\nhello\r\n" + end,
        "extension with LF": b"5;a\nhello\r\n" + end,
        "extension with LF and a request": b"2;\nxx\r\n" + size + b"\r\n0\r\n\r\n" + HIDDEN + b"\r\n" + end,
        "extension with CR": b"5;a\rb\r\nhello\r\n" + end,
        "extension with NUL": b"5;a\0b\r\nhello\r\n" + end,
        "extension with DEL": b"5;a\x7f\r\nhello\r\n" + end,
        "extension with obs-text": b"5;a=\xe9\r\nhello\r\n" + end,
        "extension of 5,000 bytes": b"5;" + b"a" * 5_000 + b"\r\nhello\r\n" + end,
        "extension of 20,000 bytes": b"5;" + b"a" * 20_000 + b"\r\nhello\r\n" + end,
        "extension of the last chunk": b"5\r\nhello\r\n0;a=b\r\n\r\n",
        "more data than the size": b"5\r\nhello!\r\n" + end,
        "less data than the size": b"5\r\nhel\r\n" + end,
        "LF behind the data": b"5\r\nhello\n" + end,
        "CR behind the data": b"5\r\nhello\r" + end,
        "nothing behind the data": b"5\r\nhello" + end,
        "two bytes for CR LF": b"5\r\nhelloXX" + end,
        "two bytes for CR LF and a request": b"5\r\nhelloXX" + end + HIDDEN,
        "last chunk 000": b"5\r\nhello\r\n000\r\n\r\n",
        "last chunk -0": b"5\r\nhello\r\n-0\r\n\r\n",
        "last chunk 0x0": b"5\r\nhello\r\n0x0\r\n\r\n",
        "LF behind the last size": b"5\r\nhello\r\n0\n\r\n",
        "LF at the end": b"5\r\nhello\r\n0\r\n\n",
        "LF at the end and a request": b"5\r\nhello\r\n0\r\n\n" + HIDDEN,
        "LF LF at the end": b"5\r\nhello\r\n0\n\n",
        "LF LF at the end and a request": b"5\r\nhello\r\n0\n\n" + HIDDEN,
        "CR at the end and a request": b"5\r\nhello\r\n0\r\n\r" + HIDDEN,
        "CR CR at the end": b"5\r\nhello\r\n0\r\r",
        "no end": b"5\r\nhello\r\n",
        "no CR LF at the end": b"5\r\nhello\r\n0\r\n",
        "trailer": b"5\r\nhello\r\n0\r\nX-Trailer: y\r\n\r\n",
        "trailer of an identity": b"5\r\nhello\r\n0\r\nX-Api-Key: key-evil\r\nX-Tenant: gold\r\nCookie: sid=evil\r\n\r\n",
        "trailer of a length": b"5\r\nhello\r\n0\r\nContent-Length: 50\r\n\r\n",
        "trailer of a host": b"5\r\nhello\r\n0\r\nHost: host.test\r\n\r\n",
        "trailer without colon": b"5\r\nhello\r\n0\r\nX\r\n\r\n",
        "trailer without name": b"5\r\nhello\r\n0\r\n: y\r\n\r\n",
        "trailer with LF": b"5\r\nhello\r\n0\r\nX: y\n\r\n",
        "trailer with LF LF and a request": b"5\r\nhello\r\n0\r\nX: y\n\n" + HIDDEN,
        "trailer with CR": b"5\r\nhello\r\n0\r\nX: y\rz\r\n\r\n",
        "trailer with NUL": b"5\r\nhello\r\n0\r\nX: \0\r\n\r\n",
        "trailer with space before the colon": b"5\r\nhello\r\n0\r\nX : y\r\n\r\n",
        "folded trailer": b"5\r\nhello\r\n0\r\nX: y\r\n z\r\n\r\n",
        "200 trailers": b"5\r\nhello\r\n0\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        "trailer of 70,000 bytes": b"5\r\nhello\r\n0\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    }
    for name, body in table.items():
        yield Case("chunks", name, request(b"POST", lines=(*BASE, b"Transfer-Encoding: chunked"), body=body))


def versions():
    names = [b"HTTP/1.0", b"HTTP/1.2", b"HTTP/1.9", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/2", b"HTTP/3", b"HTTP/1", b"HTTP/1.", b"HTTP/.1", b"HTTP/11", b"HTTP/1.10", b"HTTP/01.1"]
    names += [b"HTTP/1.01", b"HTTP/1,1", b"HTTP 1.1", b"http/1.1", b"Http/1.1", b"HTTPS/1.1", b"HTP/1.1", b"XHTTP/1.1", b"HTTP/-1.1", b"HTTP/1.1x", b"HTTP/1.1.1", b"HTTP/A.B"]
    names += [b"HTTP\\1.1", b"HTTP//1.1", b"HTTP/ 1.1", b"RTSP/1.0", b"SIP/2.0", b"\"HTTP/1.1\"", b"HTTP/1.1\0", b"HTTP/\xef\xbc\x91.1", b""]
    for name in names:
        yield Case("version", shown(name) or "empty", request(version=name))
    yield Case("version", "HTTP/0.9 request", b"GET /one\r\n", requests=1)
    yield Case("version", "HTTP/0.9 request with headers", request(version=None))
    yield Case("version", "HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", requests=0)
    yield Case("version", "HTTP/2 preface and a request", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN, requests=0)
    yield Case("version", "HTTP/1.0 kept alive, length and coding", request(b"POST", version=b"HTTP/1.0", lines=(b"Connection: keep-alive", b"Content-Length: 5", b"Transfer-Encoding: chunked"), body=b"0\r\n\r\n" + HIDDEN))
    yield Case("version", "TLS handshake", b"\x16\x03\x01\x00\x05hello\r\n\r\n", requests=0)
    yield Case("version", "PROXY line", b"PROXY TCP4 10.1.2.3 10.1.2.4 1 2\r\n" + request())
    yield Case("version", "PROXY version 2", b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12) + request())


def connections():
    for token in [b"x-api-key", b"X-Api-Key", b"x-tenant", b"cookie", b"host", b"content-length", b"transfer-encoding", b"x-request-id", b"x-forwarded-for", b"x-routed", b"authorization", b"x-case"]:
        for label, value in [("alone", token), ("with close", b"close, " + token), ("with keep-alive", token + b",keep-alive"), ("in quotes", b'"' + token + b'"')]:
            yield Case("connection", f"{shown(token)} {label}", request(lines=(*BASE, b"Connection: " + value)))
    for token in [b"x-api-key", b"x-tenant", b"cookie"]:
        name = shown(token)
        yield Case("connection", f"{name} first", request(lines=(b"Connection: " + token, *BASE)))
        yield Case("connection", f"{name} in two lines", request(lines=(*BASE, b"Connection: keep-alive", b"Connection: " + token)))
        yield Case("connection", f"{name} in an alias", request(lines=(*BASE, b"Connection_: " + token)))
        yield Case("connection", f"{name} in Proxy-Connection", request(lines=(*BASE, b"Proxy-Connection: " + token)))
        yield Case("connection", f"{name} in Keep-Alive", request(lines=(*BASE, b"Connection: keep-alive", b"Keep-Alive: " + token)))
        yield Case("connection", f"{name} with an underscore", request(lines=(*BASE, b"Connection: " + token.replace(b"-", b"_"))))
    for method, token in [(b"POST", b"content-length"), (b"GET", b"content-length")]:
        body = HIDDEN
        yield Case("connection", f"{shown(method)} whose length is nominated", request(method, lines=(b"Connection: " + token, b"Content-Length: %d" % len(body)), body=body))
    for value in [b"", b",", b"close, close", b"keep-alive, close", b"close;q=1", b"upgrade", b"TE", b"x" * 3000, b"\xff", b"close\0", b"te, upgrade, x-api-key", b"*", b"a b"]:
        yield Case("connection", (shown(value) if len(value) < 100 else "3,000 bytes") or "empty", request(lines=(*BASE, b"Connection: " + value)))


def upgrades():
    upgrade = b"Connection: Upgrade"
    table = {
        "Expect: 100-continue": (b"Content-Length: 5", b"Expect: 100-continue"),
        "Expect: 100-Continue": (b"Content-Length: 5", b"Expect: 100-Continue"),
        "Expect: 200-ok": (b"Content-Length: 5", b"Expect: 200-ok"),
        "Expect twice": (b"Content-Length: 5", b"Expect: 100-continue", b"Expect: 100-continue"),
        "Expect with a parameter": (b"Content-Length: 5", b"Expect: 100-continue;x=y"),
        "Expect, empty": (b"Content-Length: 5", b"Expect:"),
        "Expect in a list": (b"Content-Length: 5", b"Expect: 100-continue, x"),
        "Expect with obs-fold": (b"Content-Length: 5", b"Expect:", b" 100-continue"),
        "Expect with leading space": (b"Content-Length: 5", b"Expect:  100-continue "),
        "Expect with chunks": (b"Transfer-Encoding: chunked", b"Expect: 100-continue"),
        "Expect with y 100-continue": (b"Content-Length: 5", b"Expect: y 100-continue"),
    }
    for name, lines in table.items():
        body = b"5\r\nhello\r\n0\r\n\r\n" if b"chunked" in lines[0] else b"hello"
        yield Case("expect", name, request(b"POST", lines=(*BASE, *lines), body=body))
    yield Case("expect", "GET without a body", request(lines=(*BASE, b"Expect: 100-continue")))
    yield Case("expect", "GET with a hidden request", request(lines=(b"Expect: 100-continue", b"Content-Length: %d" % len(HIDDEN)), body=HIDDEN))
    yield Case("expect", "HEAD with a hidden request", request(b"HEAD", lines=(b"Expect: 100-continue", b"Content-Length: %d" % len(HIDDEN)), body=HIDDEN), method=b"HEAD")
    socket = (b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    for name, lines in {
        "websocket": (upgrade, b"Upgrade: websocket", *socket),
        "websocket of another version": (upgrade, b"Upgrade: websocket", b"Sec-WebSocket-Version: 777", socket[1]),
        "h2c": (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"),
        "h2c without settings": (upgrade, b"Upgrade: h2c"),
        "h2c and websocket": (upgrade, b"Upgrade: websocket, h2c", *socket),
        "TLS/1.3": (upgrade, b"Upgrade: TLS/1.3"),
        "HTTP/2.0": (upgrade, b"Upgrade: HTTP/2.0"),
        "without Connection": (b"Upgrade: websocket", *socket),
        "of an unknown protocol": (upgrade, b"Upgrade: foo"),
        "empty": (upgrade, b"Upgrade:"),
        "twice": (upgrade, b"Upgrade: websocket", b"Upgrade: h2c"),
        "TE: trailers": (b"Connection: TE", b"TE: trailers"),
        "TE: trailers without Connection": (b"TE: trailers",),
        "TE: gzip": (b"Connection: TE", b"TE: gzip, chunked;q=0.5"),
        "TE, empty": (b"TE:",),
        "Trailer of the key": (b"Trailer: x-api-key",),
        "Max-Forwards: 0": (b"Max-Forwards: 0",),
        "Via": (b"Via: 1.1 one, 1.0 two",),
    }.items():
        yield Case("upgrade", name, request(lines=(*BASE, *lines)))
    # Bytes after an upgrade request are the next request, unless the server has accepted the upgrade.
    for name in [b"websocket", b"h2c", b"foo"]:
        yield Case("upgrade", f"{shown(name)} and a request", request(lines=(upgrade, b"Upgrade: " + name, *socket)) + request(target=b"/two"), requests=2)


def pipelines():
    two = request(target=b"/two")
    yield Case("pipeline", "three requests", request() + two + request(target=b"/three"), requests=3)
    yield Case("pipeline", "POST, then GET", request(b"POST", lines=(*BASE, b"Content-Length: 5"), body=b"hello") + two, requests=2)
    yield Case("pipeline", "chunks, then GET", request(b"POST", lines=(*BASE, b"Transfer-Encoding: chunked"), body=b"5\r\nhello\r\n0\r\n\r\n") + two, requests=2)
    yield Case("pipeline", "CR LF between", request() + b"\r\n" + two, requests=2)
    yield Case("pipeline", "LF between", request() + b"\n" + two, requests=2)
    yield Case("pipeline", "close, then GET", request(lines=(*BASE, b"Connection: close")) + HIDDEN)
    yield Case("pipeline", "HTTP/1.0, then GET", request(version=b"HTTP/1.0") + HIDDEN)
    # The framing is unambiguous, so the connection may stay open.
    yield Case("pipeline", "no Host, then GET", request(host=()) + two, requests=2, separate=True)
    yield Case("pipeline", "bad length, then GET", request(b"POST", lines=(b"Content-Length: x",)) + HIDDEN)
    yield Case("pipeline", "junk, then GET", b"junk\r\n\r\n" + HIDDEN)
    yield Case("pipeline", "other identities", request() + request(target=b"/two", lines=(b"X-Api-Key: key-bob", b"X-Tenant: other", b"Cookie: sid=two")), requests=2)
    yield Case("pipeline", "identity, then none", request() + request(target=b"/two", lines=()), requests=2)
    yield Case("pipeline", "other host", request() + request(target=b"/two", host=(b"Host: host.test",)), requests=2)
    yield Case("pipeline", "bad request second", request() + request(target=b"/two", host=(b"Host: a b",)), requests=2, separate=True)
    yield Case("pipeline", "trailers, then GET", request(b"POST", lines=(*BASE, b"Transfer-Encoding: chunked"), body=b"0\r\nX: y\r\n\r\n") + two, requests=2)


def corpus():
    """Return all cases, each with a unique name."""
    cases = []
    for table in [honest, methods, targets, hosts, names, values, framings, chunks, versions, connections, upgrades, pipelines]:
        cases += table()
    seen = set()
    for case in cases:
        if case.id in seen:
            raise AssertionError(f"two cases are named {case.id!r}")
        seen.add(case.id)
    return cases
