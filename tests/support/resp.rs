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
    /// Each of their bytes is a character here.
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

    /// The packed argument of a script call.
    fn argument(&self) -> Vec<u8> {
        // The smallest script has none.
        let argument = self.words.get(3 + self.keys().len()).map_or("", String::as_str);
        argument.chars().map(|byte| byte as u8).collect()
    }

    /// What the first request of a script call asks for.
    pub fn operation(&self) -> Option<char> {
        self.is_script().then(|| self.argument().get(16).map(|letter| char::from(*letter))).flatten()
    }

    /// What the first request of a script call costs at its first limit.
    pub fn cost(&self) -> usize {
        packed(&self.argument(), 8 + 25 + 2)
    }

    /// How many limits each request of a script call has.
    pub fn requests(&self) -> Vec<usize> {
        let argument = self.argument();
        let number = |at| packed(&argument, at);
        let (mut at, mut requests) = (8, Vec::new());
        while at < argument.len() {
            let (size, limits) = (number(at), number(at + 17));
            requests.extend(std::iter::repeat_n(limits, size));
            at += 25 + 42 * limits;
        }
        requests
    }

    fn verdict(&self, granted: u8, status: u8) -> Answer {
        let limits: usize = self.requests().iter().sum();
        let mut fields = vec![1_800_000_000_000_000.0];
        for _ in 0..limits {
            fields.extend([granted.into(), status.into(), 5.0, 1_000_000.0, status.into()]);
        }
        Answer::Bytes(bulk(&fields))
    }

    /// An error reply to each request of a script call.
    pub fn refused(&self, text: &str) -> Answer {
        let requests = self.requests();
        let mut reply = format!("*{}\r\n", 1 + 2 * requests.len()).into_bytes();
        reply.extend(bulk(&vec![-1.0; 1 + 5 * requests.iter().sum::<usize>()]));
        let mut before = 0;
        for limits in requests {
            reply.extend(format!(":{before}\r\n-{text}\r\n").bytes());
            before += limits;
        }
        Answer::Bytes(reply)
    }

    /// An error reply to the first request of a script call; the others are admitted.
    pub fn first_refused(&self, text: &str) -> Answer {
        let mut reply = b"*3\r\n".to_vec();
        reply.extend(bulk(&self.outcomes(|_| 5)));
        reply.extend(format!(":0\r\n-{text}\r\n").bytes());
        Answer::Bytes(reply)
    }

    /// The reply to a script call of which each request is admitted; `remaining` is by key.
    pub fn admitted_with(&self, remaining: impl Fn(&str) -> u64) -> Answer {
        Answer::Bytes(bulk(&self.outcomes(remaining)))
    }

    /// The reply to a script call for one request of which each unit is granted.
    pub fn granted_in_full(&self) -> Answer {
        let mut numbers = self.outcomes(|_| 0);
        numbers[1] = self.cost() as f64;
        Answer::Bytes(bulk(&numbers))
    }

    /// The reply to a script call for one request that every limit denies for this time.
    pub fn denied_for(&self, retry_s: u64) -> Answer {
        let retry_us = retry_s as f64 * 1e6;
        let outcome = |_: &String| [0.0, 1.0, 0.0, retry_us, retry_us];
        let numbers: Vec<_> =
            [1_800_000_000_000_000.0].into_iter().chain(self.keys().iter().flat_map(outcome)).collect();
        Answer::Bytes(bulk(&numbers))
    }

    fn outcomes(&self, remaining: impl Fn(&str) -> u64) -> Vec<f64> {
        let outcome = |key: &String| [1.0, 0.0, remaining(key) as f64, 1_000_000.0, 0.0];
        [1_800_000_000_000_000.0].into_iter().chain(self.keys().iter().flat_map(outcome)).collect()
    }
}

fn packed(argument: &[u8], at: usize) -> usize {
    f64::from_le_bytes(argument[at..at + 8].try_into().unwrap()) as usize
}

/// A bulk string of numbers, as a script replies.
fn bulk(numbers: &[f64]) -> Vec<u8> {
    let head = format!("${}\r\n", 8 * numbers.len());
    head.bytes().chain(numbers.iter().flat_map(|number| number.to_le_bytes())).chain(*b"\r\n").collect()
}

/// What the server does with a command.
pub enum Answer {
    /// What a healthy server without limits does.
    Usual,
    /// Exactly this.
    Text(String),
    Bytes(Vec<u8>),
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
                let answer = match answer(&command) {
                    Answer::Usual if command.is_script() => command.admitted(),
                    answer => answer,
                };
                let bytes = match answer {
                    Answer::Usual => b"+OK\r\n".to_vec(),
                    Answer::Text(text) => text.into_bytes(),
                    Answer::Bytes(bytes) => bytes,
                    Answer::Silence => continue,
                    Answer::Close => return,
                };
                if stream.get_mut().write_all(&bytes).is_err() {
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
        Some(word.into_iter().map(char::from).collect())
    };
    (0..count).map(word).collect()
}

fn number(stream: &mut BufReader<TcpStream>, mark: char) -> Option<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).ok()?;
    line.trim_end().strip_prefix(mark)?.parse().ok()
}
