//! An HTTP/1.1 client that sends exactly the given bytes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};

use super::MAX_WAIT;

/// A client connection.
pub struct Client<S = TcpStream> {
    pub stream: BufReader<S>,
}

/// A response.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        Client::over(stream)
    }

    /// Connect from another loopback address.
    pub fn connect_from(local: IpAddr, address: SocketAddr) -> Client {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::new(local, 0).into()).unwrap();
        socket.connect(&address.into()).unwrap();
        Client::over(socket.into())
    }

    fn over(stream: TcpStream) -> Client {
        stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Client { stream: BufReader::new(stream) }
    }
}

impl<S: Read + Write> Client<S> {
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).unwrap();
    }

    /// Send a GET request without further headers. Return the response.
    pub fn get(&mut self, path: &str) -> Reply {
        self.request("GET", path, &[], b"")
    }

    /// Send a GET request with these headers. Return the response.
    pub fn get_with(&mut self, path: &str, headers: &[(&str, &str)]) -> Reply {
        self.request("GET", path, headers, b"")
    }

    pub fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head.push_str("Host: gateway.test\r\n");
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        self.send(head.as_bytes());
        self.send(body);
        self.reply_to(method).unwrap()
    }

    /// Read a response. Return `None` if the connection is closed before a response arrives.
    pub fn reply(&mut self) -> Option<Reply> {
        self.reply_to("GET")
    }

    fn reply_to(&mut self, method: &str) -> Option<Reply> {
        let mut reply = self.head()?;
        let length = reply.header("content-length").map(|length| length.parse::<usize>().unwrap());
        if method == "HEAD" || reply.status == 204 || reply.status == 304 {
        } else if reply.header("transfer-encoding") == Some("chunked") {
            loop {
                let size = usize::from_str_radix(self.line().unwrap().trim(), 16).unwrap();
                let mut chunk = vec![0; size + 2];
                self.stream.read_exact(&mut chunk).unwrap();
                if size == 0 {
                    break;
                }
                reply.body.extend_from_slice(&chunk[..size]);
            }
        } else if let Some(length) = length {
            reply.body = vec![0; length];
            self.stream.read_exact(&mut reply.body).unwrap();
        } else {
            self.stream.read_to_end(&mut reply.body).unwrap();
        }
        Some(reply)
    }

    /// Read the status line and the headers of a response.
    pub fn head(&mut self) -> Option<Reply> {
        let first = self.line()?;
        let status = first.split(' ').nth(1).unwrap_or_else(|| panic!("no status line: {first}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let line = self.line().unwrap();
            // A header may be empty.
            match line.trim_end_matches(['\r', '\n']).split_once(':') {
                Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_owned())),
                None => break,
            }
        }
        Some(Reply { status, headers, body: Vec::new() })
    }

    /// Read the next chunk of a chunked response, after its headers. Return `None` at the end.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let line = self.line().unwrap();
        let size = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|_| panic!("no chunk size: {line:?}"));
        let mut chunk = vec![0; size + 2];
        self.stream.read_exact(&mut chunk).unwrap();
        chunk.truncate(size);
        (size > 0).then_some(chunk)
    }

    /// Read chunks until the text that was read ends with `end`. Return the text.
    pub fn chunks_until(&mut self, end: &str) -> String {
        let mut body = Vec::new();
        while !body.ends_with(end.as_bytes()) {
            body.extend(
                self.chunk().unwrap_or_else(|| panic!("no {end:?} in the response {}", String::from_utf8_lossy(&body))),
            );
        }
        String::from_utf8(body).unwrap()
    }

    /// Read the rest of a chunked response, after its headers.
    pub fn reply_rest(&mut self) -> String {
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk() {
            body.extend_from_slice(&chunk);
        }
        String::from_utf8(body).unwrap()
    }

    /// Assert that the gateway closes the connection without sending another byte.
    pub fn assert_closed(&mut self, what: &str) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("{what}: not closed: {error}"),
            _ => assert_eq!(String::from_utf8_lossy(&rest), "", "{what}: bytes follow the response"),
        }
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        // A connection that is reset counts as closed.
        match self.stream.read_line(&mut line) {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(line),
        }
    }
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// Return the parameter `r` (the remaining quota) of a limit in the RateLimit header.
    pub fn remaining(&self, limit: &str) -> u64 {
        let field = self.header("ratelimit").unwrap_or_else(|| panic!("no RateLimit: {self:?}"));
        let (_, item) =
            field.split_once(&format!("\"{limit}\";r=")).unwrap_or_else(|| panic!("no limit `{limit}` in {field}"));
        item.split(';').next().unwrap().parse().unwrap()
    }

    /// Assert that this is an error response of the gateway: a problem document with the same status as the response.
    pub fn assert_problem(&self, status: u16, what: &str) {
        assert_eq!(self.status, status, "{what}: {}", String::from_utf8_lossy(&self.body));
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{what}");
        assert_eq!(self.header("cache-control"), Some("no-store"), "{what}");
        let problem = self.json();
        assert_eq!(problem["status"], status, "{what}: {problem}");
        for field in ["type", "title", "detail"] {
            assert!(problem[field].as_str().is_some_and(|text| !text.is_empty()), "{what}: no {field} in {problem}");
        }
    }
}

/// Send `total` GET requests over `connections` concurrent connections. Return all statuses.
pub fn load(
    addresses: &[SocketAddr],
    connections: usize,
    total: usize,
    path: &str,
    headers: &[(&str, &str)],
) -> Vec<u16> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..connections)
            .map(|index| {
                let address = addresses[index % addresses.len()];
                let share = total / connections + usize::from(index < total % connections);
                scope.spawn(move || {
                    let mut client = Client::connect(address);
                    (0..share).map(|_| client.get_with(path, headers).status).collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}
