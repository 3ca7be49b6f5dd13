//! A DNS server on a free port. It sends the answers that the test sets, and records the queries that it receives.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::proto::op::{Message, ResponseCode};
use hickory_resolver::proto::rr::rdata::SRV;
use hickory_resolver::proto::rr::{RData, Record, RecordType};
use sluicegate::upstream::dns::DnsResolver;

use super::MAX_WAIT;

/// The answer to queries for a name and a record type.
#[derive(Clone)]
pub enum DnsAnswer {
    /// These addresses, with a TTL in seconds.
    At(Vec<IpAddr>, u32),
    /// A response code: success without data, no such name, or a server failure.
    Code(ResponseCode),
    /// These targets of an SRV record, with a TTL in seconds.
    Targets(Vec<SRV>, u32),
    /// No answer. [`NameServer::release`] sends one later.
    Nothing,
}

/// A recorded query: name, record type and time.
pub type Query = (String, RecordType, Instant);

/// A query without an answer, and its client.
type HeldQuery = (Message, SocketAddr);

/// A running DNS server. Its thread ends with the test process.
pub struct NameServer {
    address: SocketAddr,
    answers: Arc<Mutex<HashMap<(String, RecordType), DnsAnswer>>>,
    queries: Arc<Mutex<Vec<Query>>>,
    held: Arc<Mutex<Vec<HeldQuery>>>,
    socket: UdpSocket,
}

impl NameServer {
    /// Start a server that has no answers yet.
    pub fn start() -> NameServer {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let answers = Arc::<Mutex<HashMap<_, _>>>::default();
        let queries = Arc::<Mutex<Vec<Query>>>::default();
        let (answers_of_thread, record) = (answers.clone(), queries.clone());
        let held = Arc::<Mutex<Vec<_>>>::default();
        let (hold, server) = (held.clone(), socket.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok((length, client)) = socket.recv_from(&mut buffer) {
                let mut message = Message::from_vec(&buffer[..length]).unwrap();
                let query = message.queries[0].clone();
                let name = query.name().to_ascii().trim_end_matches('.').to_ascii_lowercase();
                let key = (name, query.query_type());
                record.lock().unwrap().push((key.0.clone(), key.1, Instant::now()));
                let answer = answers_of_thread.lock().unwrap().get(&key).cloned();
                message = message.into_response();
                message.edns = None;
                match answer.unwrap_or(DnsAnswer::Code(ResponseCode::NXDomain)) {
                    DnsAnswer::At(addresses, ttl) => {
                        let record = |address| Record::from_rdata(query.name().clone(), ttl, RData::from(address));
                        message.insert_answers(addresses.into_iter().map(record).collect());
                    }
                    DnsAnswer::Code(code) => message.metadata.response_code = code,
                    DnsAnswer::Targets(targets, ttl) => {
                        let record = |srv| Record::from_rdata(query.name().clone(), ttl, RData::SRV(srv));
                        message.insert_answers(targets.into_iter().map(record).collect());
                    }
                    DnsAnswer::Nothing => {
                        hold.lock().unwrap().push((message, client));
                        continue;
                    }
                }
                socket.send_to(&message.to_vec().unwrap(), client).unwrap();
            }
        });
        NameServer { address, answers, queries, held, socket: server }
    }

    /// Set the targets of an SRV record: priority, weight, port and host. The TTL is 1 s.
    pub fn set_targets(&self, name: &str, targets: &[(u16, u16, u16, &str)]) {
        let srv = |(priority, weight, port, host): &(u16, u16, u16, &str)| {
            SRV::new(*priority, *weight, *port, format!("{host}.").parse().unwrap())
        };
        self.set_answer(name, RecordType::SRV, DnsAnswer::Targets(targets.iter().map(srv).collect(), 1));
    }

    /// Send this address in response to all queries that have no answer yet.
    pub fn release(&self, address: &str) {
        for (mut message, client) in self.held.lock().unwrap().drain(..) {
            let name = message.queries[0].name().clone();
            let address: IpAddr = address.parse().unwrap();
            message.insert_answers(vec![Record::from_rdata(name, 60, RData::from(address))]);
            self.socket.send_to(&message.to_vec().unwrap(), client).unwrap();
        }
    }

    /// Set the answer for a name and a record type.
    pub fn set_answer(&self, name: &str, record_type: RecordType, answer: DnsAnswer) {
        self.answers.lock().unwrap().insert((name.to_owned(), record_type), answer);
    }

    /// Set the IPv4 and IPv6 addresses of a name, with a TTL in seconds.
    pub fn set_addresses(&self, name: &str, addresses: &[&str], ttl: u32) {
        let (v6, v4): (Vec<IpAddr>, Vec<IpAddr>) =
            addresses.iter().map(|text| text.parse::<IpAddr>().unwrap()).partition(IpAddr::is_ipv6);
        for (record_type, addresses) in [(RecordType::A, v4), (RecordType::AAAA, v6)] {
            let none = addresses.is_empty();
            self.set_answer(
                name,
                record_type,
                if none { DnsAnswer::Code(ResponseCode::NoError) } else { DnsAnswer::At(addresses, ttl) },
            );
        }
    }

    /// Set the same answer for A and AAAA queries of a name.
    pub fn set_both(&self, name: &str, answer: &DnsAnswer) {
        for record_type in [RecordType::A, RecordType::AAAA] {
            self.set_answer(name, record_type, answer.clone());
        }
    }

    /// Return the times of the A queries for a name.
    pub fn query_times(&self, name: &str) -> Vec<Instant> {
        let queries = self.queries.lock().unwrap();
        queries.iter().filter(|(of, kind, _)| of == name && *kind == RecordType::A).map(|(.., when)| *when).collect()
    }

    /// Return the number of queries for a name and a record type.
    pub fn query_count(&self, name: &str, record_type: RecordType) -> usize {
        let queries = self.queries.lock().unwrap();
        queries.iter().filter(|(of, kind, _)| of == name && *kind == record_type).count()
    }

    /// Return a resolver that uses this server.
    pub fn resolver(&self, search: &[&str]) -> DnsResolver {
        // No packet is lost on loopback, so a short timeout is sufficient to detect silence.
        self.resolver_with_timeout(search, MAX_WAIT / 40)
    }

    pub fn resolver_with_timeout(&self, search: &[&str], timeout: Duration) -> DnsResolver {
        let mut connection = ConnectionConfig::udp();
        connection.port = self.address.port();
        let server = NameServerConfig::new(self.address.ip(), true, vec![connection]);
        let mut config = ResolverConfig::from_name_servers(vec![server]);
        search.iter().for_each(|domain| config.add_search(domain.parse().unwrap()));
        let mut options = ResolverOpts::default();
        options.timeout = timeout;
        options.attempts = 1;
        DnsResolver::Servers(Box::new(config), Box::new(options))
    }
}
