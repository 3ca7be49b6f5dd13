//! An HTTP/2 client that works with single frames, so that it can break the protocol (RFC 9113, RFC 7541).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;

/// The identifier of the setting SETTINGS_INITIAL_WINDOW_SIZE.
pub const INITIAL_WINDOW_SIZE: u16 = 4;

/// A client connection on which only the frames of the test are sent.
pub struct Http2 {
    pub stream: TcpStream,
}

/// A received frame.
#[derive(Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// Encode a frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Encode a header block as literals, without indexing and without Huffman coding.
pub fn block(method: &str, path: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    let pseudo = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "gateway.test")];
    for (name, value) in pseudo.iter().chain(fields) {
        block.push(0);
        for text in [name, value] {
            assert!(text.len() < 127, "the length must fit into one byte");
            block.push(text.len() as u8);
            block.extend(text.as_bytes());
        }
    }
    block
}

impl Http2 {
    /// Connect and send the preface and SETTINGS. Do not wait for the server.
    pub fn connect(address: SocketAddr, settings: &[(u16, u32)]) -> Http2 {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(super::MAX_WAIT)).unwrap();
        let mut client = Http2 { stream };
        let mut payload = Vec::new();
        for (name, value) in settings {
            payload.extend(name.to_be_bytes());
            payload.extend(value.to_be_bytes());
        }
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend(frame(SETTINGS, 0, 0, &payload));
        client.send(&bytes).unwrap();
        client
    }

    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Send a GET request on a new stream.
    pub fn get(&mut self, stream: u32, path: &str) {
        let bytes = frame(HEADERS, END_STREAM | END_HEADERS, stream, &block("GET", path, &[]));
        self.send(&bytes).unwrap();
    }

    /// Read the next frame. Return `None` if the connection is closed.
    pub fn next(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head).ok()?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        self.stream.read_exact(&mut payload).ok()?;
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        Some(Frame { kind: head[3], flags: head[4], stream, payload })
    }

    /// Read frames until one of this kind arrives on the stream. Return `None` if the connection is closed first.
    pub fn until(&mut self, kind: u8, stream: u32) -> Option<Frame> {
        loop {
            let frame = self.next()?;
            if frame.kind == kind && frame.stream == stream {
                return Some(frame);
            }
        }
    }

    /// Set the read timeout.
    pub fn set_read_timeout(&self, patience: Duration) {
        self.stream.set_read_timeout(Some(patience)).unwrap();
    }
}
