//! A fake Redis that speaks the Redis protocol and sends the replies that the test chooses.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::upstream::serve;

/// A received command.
#[derive(Debug, Clone)]
pub struct Command {
    /// The number of the connection, counted from 1.
    pub connection: usize,
    /// The words of the command. Each character stands for a byte.
    pub words: Vec<String>,
}

impl Command {
    pub fn is(&self, verb: &str) -> bool {
        self.words[0] == verb
    }

    pub fn is_script(&self) -> bool {
        self.is("EVALSHA") || self.is("EVAL")
    }

    /// Return whether this is a probe of the circuit breaker.
    pub fn is_probe(&self) -> bool {
        self.is_script() && self.keys().iter().all(|key| key.contains("~probe"))
    }

    /// Return the keys of a script call.
    pub fn keys(&self) -> &[String] {
        let count: usize = self.words[2].parse().unwrap();
        &self.words[3..3 + count]
    }

    /// Return the reply to an admitted check.
    pub fn admitted(&self) -> Answer {
        self.verdict(1, 0)
    }

    /// Return the reply to a denied check with a retry delay of 0.
    pub fn denied(&self) -> Answer {
        self.verdict(0, 1)
    }

    /// Return the binary argument of a script call.
    fn argument(&self) -> Vec<u8> {
        // The shortest script call has no argument.
        let argument = self.words.get(3 + self.keys().len()).map_or("", String::as_str);
        argument.chars().map(|byte| byte as u8).collect()
    }

    /// Return the letter that encodes the operation of the first request in a script call. Return `None` for a script
    /// call without an argument and for other commands.
    pub fn operation(&self) -> Option<char> {
        self.is_script().then(|| self.argument().get(17).map(|letter| char::from(*letter))).flatten()
    }

    /// Return the cost that the first request of a script call charges to its first limit.
    pub fn cost(&self) -> usize {
        packed(&self.argument(), 9 + 25 + 3 + 8)
    }

    /// Return the number of limits of each request in a script call.
    pub fn requests(&self) -> Vec<usize> {
        let argument = self.argument();
        let number = |at| packed(&argument, at);
        let (mut at, mut requests) = (9, Vec::new());
        while at < argument.len() {
            let (size, limits) = (number(at), number(at + 17));
            requests.extend(std::iter::repeat_n(limits, size));
            at += 25 + 51 * limits;
        }
        requests
    }

    fn verdict(&self, granted: u8, status: u8) -> Answer {
        let fields = [granted.into(), status.into(), 5.0, 1_000_000.0, status.into()];
        script_reply(self.requests().into_iter().map(|limits| Ok(fields.repeat(limits))))
    }

    /// Return a reply to a script call in which every request has this error.
    pub fn refused(&self, text: &str) -> Answer {
        script_reply(self.requests().into_iter().map(|_| Err(text)))
    }

    /// Return a reply to a script call in which the first request has this error and all others are admitted.
    pub fn first_refused(&self, text: &str) -> Answer {
        let admitted = self.outcomes(|_, _| 5).into_iter().skip(1).map(Ok);
        script_reply(std::iter::once(Err(text)).chain(admitted))
    }

    /// Return the reply to a script call that admits each request. `remaining` returns the remaining quota for a key
    /// and the number of a limit.
    pub fn admitted_with(&self, remaining: impl Fn(&str, usize) -> u64) -> Answer {
        script_reply(self.outcomes(remaining).into_iter().map(Ok))
    }

    /// Return the reply to a script call with one request that grants the full cost.
    pub fn granted_in_full(&self) -> Answer {
        let mut outcomes = self.outcomes(|_, _| 0);
        outcomes[0][0] = self.cost() as f64;
        script_reply(outcomes.into_iter().map(Ok))
    }

    /// Return the reply to a script call with one request that every limit denies. The retry delay is `retry_s`
    /// seconds.
    pub fn denied_for(&self, retry_s: u64) -> Answer {
        let retry_us = retry_s as f64 * 1e6;
        let denied = [0.0, 1.0, 0.0, retry_us, retry_us];
        script_reply(self.requests().into_iter().map(|limits| Ok(denied.repeat(limits))))
    }

    /// Return the outcomes of the limits of each request. `remaining` returns the remaining quota for the key of a request
    /// and the number of the limit. All limits of a request have the same key.
    fn outcomes(&self, remaining: impl Fn(&str, usize) -> u64) -> Vec<Vec<f64>> {
        let (keys, requests) = (self.keys(), self.requests());
        assert_eq!(keys.len(), requests.len(), "a key for each request");
        let outcome = |key: &str, limit| [1.0, 0.0, remaining(key, limit) as f64, 1_000_000.0, 0.0];
        let of = |(key, limits): (&String, usize)| (0..limits).flat_map(|limit| outcome(key, limit)).collect();
        keys.iter().zip(requests).map(of).collect()
    }
}

fn packed(argument: &[u8], at: usize) -> usize {
    f64::from_le_bytes(argument[at..at + 8].try_into().unwrap()) as usize
}

/// Return a reply of the generic script: the time and a letter, then the outcomes or the error of each request.
fn script_reply<'a>(requests: impl Iterator<Item = Result<Vec<f64>, &'a str>>) -> Answer {
    let bulk = |bytes: Vec<u8>| [format!("${}\r\n", bytes.len()).as_bytes(), &bytes, b"\r\n"].concat();
    let start = bulk([&1_800_000_000_000_000_f64.to_le_bytes()[..], b"o"].concat());
    let element = |request: Result<Vec<f64>, &str>| match request {
        Ok(numbers) => bulk(numbers.iter().flat_map(|number| number.to_le_bytes()).collect()),
        Err(text) => format!("-{text}\r\n").into_bytes(),
    };
    let elements: Vec<_> = std::iter::once(start).chain(requests.map(element)).collect();
    Answer::Bytes([format!("*{}\r\n", elements.len()).into_bytes(), elements.concat()].concat())
}

/// The reply of the fake server to a command.
pub enum Answer {
    /// Admit each script call, and reply `OK` to all other commands.
    Usual,
    /// Reply with exactly this text.
    Text(String),
    Bytes(Vec<u8>),
    Silence,
    Close,
}

/// Return an error reply.
pub fn error(text: &str) -> Answer {
    Answer::Text(format!("-{text}\r\n"))
}

/// A running server. Its threads end with the test process.
pub struct FakeRedis {
    pub address: SocketAddr,
    connections: Arc<AtomicUsize>,
    seen: Arc<Mutex<Vec<Command>>>,
}

impl FakeRedis {
    /// Start a server. `answer` chooses the reply to each command.
    pub fn start(answer: impl Fn(&Command) -> Answer + Send + Sync + 'static) -> FakeRedis {
        let (connections, seen) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<_>>>::default());
        let (count, record) = (connections.clone(), seen.clone());
        let address = serve(move |stream| {
            let connection = count.fetch_add(1, Ordering::SeqCst) + 1;
            let mut stream = BufReader::new(stream);
            while let Some(words) = command(&mut stream) {
                let command = Command { connection, words };
                // The tests are about the checks, so a gateway counts only itself.
                if command.is_script() && command.keys().iter().any(|key| key.ends_with(":gateways")) {
                    if stream.get_mut().write_all(b":1\r\n").is_err() {
                        return;
                    }
                    continue;
                }
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

    /// Return the number of connections that were opened so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Return the number of connections for calls that were opened so far. Unlike the connections for PING, they have
    /// loaded the scripts or called one.
    pub fn call_connections(&self) -> usize {
        let seen = self.seen.lock().unwrap();
        let calls = seen.iter().filter(|command| command.is("SCRIPT") || command.is_script());
        calls.map(|command| command.connection).collect::<BTreeSet<_>>().len()
    }

    /// Return the script calls so far, without probes of the circuit breaker.
    pub fn calls(&self) -> Vec<Command> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|command| command.is_script() && !command.is_probe()).cloned().collect()
    }

    /// Return the number of requests in all of these calls.
    pub fn requests(&self) -> usize {
        self.calls().iter().map(|call| call.requests().len()).sum()
    }

    /// Return the number of probes of the circuit breaker so far.
    pub fn probes(&self) -> usize {
        self.seen.lock().unwrap().iter().filter(|command| command.is_probe()).count()
    }
}

/// Read a command, which is an array of bulk strings. Return `None` at the end of the connection.
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
