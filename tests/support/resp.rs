//! A server that speaks enough of Redis' protocol to be taken for one, and answers as the test says.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::upstream::serve;

/// A command as the server saw it.
#[derive(Debug, Clone)]
pub struct Command {
    /// The how manieth connection it came by, from 1 on.
    pub connection: usize,
    pub words: Vec<String>,
}

impl Command {
    pub fn is(&self, verb: &str) -> bool {
        self.words[0] == verb
    }

    pub fn is_script(&self) -> bool {
        self.is("EVALSHA") || self.is("EVAL")
    }

    /// Whether it asks for a sign of life.
    pub fn is_probe(&self) -> bool {
        self.is_script() && self.keys().iter().all(|key| key.contains("~probe"))
    }

    /// Of a script call.
    pub fn keys(&self) -> &[String] {
        let count: usize = self.words[2].parse().unwrap();
        &self.words[3..3 + count]
    }

    /// The reply to a check that is admitted.
    pub fn admitted(&self) -> Answer {
        self.verdict(1, 0)
    }

    /// The reply to a check that is denied, and may be admitted at once.
    pub fn denied(&self) -> Answer {
        self.verdict(0, 1)
    }

    /// How many limits each request of a script call has.
    pub fn requests(&self) -> Vec<usize> {
        let arguments = &self.words[3 + self.keys().len()..];
        let (mut at, mut requests) = (1, Vec::new());
        while at < arguments.len() {
            let number = |index: usize| arguments[index].parse::<usize>().unwrap();
            let (size, limits) = (number(at), number(at + 3));
            requests.extend(std::iter::repeat_n(limits, size));
            at += 4 + 7 * limits;
        }
        requests
    }

    fn verdict(&self, granted: u8, status: u8) -> Answer {
        let outcome = format!(":{status}\r\n:5\r\n:1000000\r\n:{status}\r\n");
        self.each(|limits| format!(":{granted}\r\n{}", outcome.repeat(limits)))
    }

    /// An error reply to each request of a script call.
    pub fn refused(&self, text: &str) -> Answer {
        self.each(|limits| format!("-{text}\r\n{}", ":0\r\n".repeat(4 * limits)))
    }

    fn each(&self, reply: impl Fn(usize) -> String) -> Answer {
        let requests = self.requests();
        let fields = 1 + requests.iter().map(|limits| 1 + 4 * limits).sum::<usize>();
        let replies: String = requests.into_iter().map(reply).collect();
        Answer::Text(format!("*{fields}\r\n:1800000000000000\r\n{replies}"))
    }
}

/// What the server does with a command.
pub enum Answer {
    /// What a healthy server without limits does.
    Usual,
    /// Exactly these bytes.
    Text(String),
    Silence,
    Close,
}

/// An error reply.
pub fn error(text: &str) -> Answer {
    Answer::Text(format!("-{text}\r\n"))
}

/// A running server; its threads end with the test's process.
pub struct FakeRedis {
    pub address: SocketAddr,
    connections: Arc<AtomicUsize>,
    seen: Arc<Mutex<Vec<Command>>>,
}

impl FakeRedis {
    /// A server that answers each command with what `answer` makes of it.
    pub fn start(answer: impl Fn(&Command) -> Answer + Send + Sync + 'static) -> FakeRedis {
        let (connections, seen) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<_>>>::default());
        let (count, record) = (connections.clone(), seen.clone());
        let address = serve(move |stream| {
            let connection = count.fetch_add(1, Ordering::SeqCst) + 1;
            let mut stream = BufReader::new(stream);
            while let Some(words) = command(&mut stream) {
                let command = Command { connection, words };
                record.lock().unwrap().push(command.clone());
                let text = match answer(&command) {
                    Answer::Text(text) => text,
                    Answer::Usual if command.is_script() => match command.admitted() {
                        Answer::Text(text) => text,
                        _ => unreachable!(),
                    },
                    Answer::Usual => "+OK\r\n".to_owned(),
                    Answer::Silence => continue,
                    Answer::Close => return,
                };
                if stream.get_mut().write_all(text.as_bytes()).is_err() {
                    return;
                }
            }
        });
        FakeRedis { address, connections, seen }
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// How many connections it has had.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// The script calls of requests so far.
    pub fn calls(&self) -> Vec<Command> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|command| command.is_script() && !command.is_probe()).cloned().collect()
    }

    /// How many requests they were for.
    pub fn requests(&self) -> usize {
        self.calls().iter().map(|call| call.requests().len()).sum()
    }

    /// How often it was asked for a sign of life.
    pub fn probes(&self) -> usize {
        self.seen.lock().unwrap().iter().filter(|command| command.is_probe()).count()
    }
}

/// An array of bulk strings; none at the end of the connection.
fn command(stream: &mut BufReader<TcpStream>) -> Option<Vec<String>> {
    let count = number(stream, '*')?;
    let word = |_| {
        let mut word = vec![0; number(stream, '$')? + 2];
        stream.read_exact(&mut word).ok()?;
        word.truncate(word.len() - 2);
        Some(String::from_utf8_lossy(&word).into_owned())
    };
    (0..count).map(word).collect()
}

fn number(stream: &mut BufReader<TcpStream>, mark: char) -> Option<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).ok()?;
    line.trim_end().strip_prefix(mark)?.parse().ok()
}
