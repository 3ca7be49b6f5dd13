//! Upstreams for tests: one that records requests and sends responses, and raw sockets.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A recorded request.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The request line and the headers, including the empty line.
    pub head: String,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn target(&self) -> &str {
        self.head.split(' ').nth(1).unwrap()
    }

    pub fn headers(&self, name: &str) -> Vec<&str> {
        let lines = self.head.lines().skip(1).filter_map(|line| line.split_once(": "));
        lines.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
    }
}

/// An upstream. Its threads end with the test process.
pub struct Upstream {
    pub address: SocketAddr,
    /// All complete requests.
    pub seen: Arc<Mutex<Vec<Seen>>>,
    /// The headers of all requests, even if their body is incomplete.
    pub heads: Arc<Mutex<Vec<String>>>,
}

impl Upstream {
    /// Start an upstream that responds `ok` to every request.
    pub fn start() -> Upstream {
        Upstream::responding(|_| b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec())
    }

    /// Start an upstream that responds with the raw bytes that `answer` returns.
    pub fn responding(answer: impl Fn(&Seen) -> Vec<u8> + Send + Sync + 'static) -> Upstream {
        let seen = Arc::<Mutex<Vec<Seen>>>::default();
        let heads = Arc::<Mutex<Vec<String>>>::default();
        let (record, begun) = (seen.clone(), heads.clone());
        let address = serve(move |mut stream| {
            while let Some(head) = read_head(&mut stream) {
                begun.lock().unwrap().push(head.clone());
                let Some(request) = read_body(&mut stream, head) else { return };
                record.lock().unwrap().push(request.clone());
                if stream.write_all(&answer(&request)).is_err() {
                    return;
                }
            }
        });
        Upstream { address, seen, heads }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Return the last request.
    pub fn last(&self) -> Seen {
        self.seen.lock().unwrap().last().expect("a request").clone()
    }

    pub fn count(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
}

/// Accept connections and run `connection` in a new thread for each.
pub fn serve(connection: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let connection = Arc::new(connection);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let connection = connection.clone();
            std::thread::spawn(move || connection(stream));
        }
    });
    address
}

/// Read the request line and the headers up to the empty line. Return `None` if the connection is closed first.
pub fn read_head(stream: &mut impl Read) -> Option<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    Some(String::from_utf8(head).unwrap())
}

/// Read a request. Return `None` if the connection is closed first.
pub fn read_request(stream: &mut impl Read) -> Option<Seen> {
    let head = read_head(stream)?;
    read_body(stream, head)
}

fn read_body(stream: &mut impl Read, head: String) -> Option<Seen> {
    let mut seen = Seen { head, body: Vec::new() };
    if let [length] = seen.headers("content-length")[..] {
        seen.body = vec![0; length.parse().unwrap()];
        stream.read_exact(&mut seen.body).ok()?;
    } else if seen.headers("transfer-encoding") == ["chunked"] {
        loop {
            let mut line = Vec::new();
            while !line.ends_with(b"\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).ok()?;
                line.push(byte[0]);
            }
            let size = usize::from_str_radix(std::str::from_utf8(&line).unwrap().trim(), 16).unwrap();
            let mut chunk = vec![0; size + 2];
            stream.read_exact(&mut chunk).ok()?;
            seen.body.extend_from_slice(&chunk[..size]);
            if size == 0 {
                break;
            }
        }
    }
    Some(seen)
}

/// Start an upstream whose responses begin but never end.
pub fn endless() -> SocketAddr {
    serve(|mut stream| {
        if read_head(&mut stream).is_some() {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
            drop(std::io::copy(&mut stream, &mut std::io::sink()));
        }
    })
}
