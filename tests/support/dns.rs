//! A DNS server on a free port. It sends the answers that the test sets, and records the queries that it receives.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::proto::op::{Message, ResponseCode};
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
    Nothing,
}

/// A recorded query: name, record type and time.
pub type Query = (String, RecordType, Instant);

/// A running DNS server. Its thread ends with the test process.
pub struct NameServer {
    address: SocketAddr,
    answers: Arc<Mutex<HashMap<(String, RecordType), DnsAnswer>>>,
    queries: Arc<Mutex<Vec<Query>>>,
}

impl NameServer {
    /// Start a server that has no answers yet.
    pub fn start() -> NameServer {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let answers = Arc::<Mutex<HashMap<_, _>>>::default();
        let queries = Arc::<Mutex<Vec<Query>>>::default();
        let (answers_of_thread, record) = (answers.clone(), queries.clone());
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
                    DnsAnswer::Nothing => continue,
                }
                socket.send_to(&message.to_vec().unwrap(), client).unwrap();
            }
        });
        NameServer { address, answers, queries }
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

    /// Return a resolver that uses this server.
    pub fn resolver(&self, search: &[&str]) -> DnsResolver {
        let mut connection = ConnectionConfig::udp();
        connection.port = self.address.port();
        let server = NameServerConfig::new(self.address.ip(), true, vec![connection]);
        let mut config = ResolverConfig::from_name_servers(vec![server]);
        search.iter().for_each(|domain| config.add_search(domain.parse().unwrap()));
        let mut options = ResolverOpts::default();
        // No packet is lost on loopback, so a short timeout is sufficient to detect silence.
        options.timeout = MAX_WAIT / 40;
        options.attempts = 1;
        DnsResolver::Servers(Box::new(config), Box::new(options))
    }
}
