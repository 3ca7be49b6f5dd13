//! A DNS server on a free port that answers as the test says and records its queries.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::proto::op::{Message, ResponseCode};
use hickory_resolver::proto::rr::{RData, Record, RecordType};
use sluicegate::upstream::dns::DnsResolver;

use super::PATIENCE;

/// The answer for a name and a record type.
#[derive(Clone)]
pub enum Say {
    /// These addresses, with a TTL in seconds.
    At(Vec<IpAddr>, u32),
    /// No data of this type, no such name, or a server failure.
    Code(ResponseCode),
    Nothing,
}

/// A query and its time.
pub type Asked = (String, RecordType, Instant);

/// A running DNS server. Its thread ends with the test process.
pub struct NameServer {
    address: SocketAddr,
    answers: Arc<Mutex<HashMap<(String, RecordType), Say>>>,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl NameServer {
    /// Start a server that knows no names.
    pub fn start() -> NameServer {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let answers = Arc::<Mutex<HashMap<_, _>>>::default();
        let asked = Arc::<Mutex<Vec<Asked>>>::default();
        let (says, record) = (answers.clone(), asked.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok((length, client)) = socket.recv_from(&mut buffer) {
                let mut message = Message::from_vec(&buffer[..length]).unwrap();
                let query = message.queries[0].clone();
                let name = query.name().to_ascii().trim_end_matches('.').to_ascii_lowercase();
                let key = (name, query.query_type());
                record.lock().unwrap().push((key.0.clone(), key.1, Instant::now()));
                let say = says.lock().unwrap().get(&key).cloned();
                message = message.into_response();
                message.edns = None;
                match say.unwrap_or(Say::Code(ResponseCode::NXDomain)) {
                    Say::At(addresses, ttl) => {
                        let record = |address| Record::from_rdata(query.name().clone(), ttl, RData::from(address));
                        message.insert_answers(addresses.into_iter().map(record).collect());
                    }
                    Say::Code(code) => message.metadata.response_code = code,
                    Say::Nothing => continue,
                }
                socket.send_to(&message.to_vec().unwrap(), client).unwrap();
            }
        });
        NameServer { address, answers, asked }
    }

    /// Set the answer for a name and a type.
    pub fn say(&self, name: &str, record_type: RecordType, say: Say) {
        self.answers.lock().unwrap().insert((name.to_owned(), record_type), say);
    }

    /// Set the addresses of both families, with a TTL in seconds.
    pub fn at(&self, name: &str, addresses: &[&str], ttl: u32) {
        let (v6, v4): (Vec<IpAddr>, Vec<IpAddr>) =
            addresses.iter().map(|text| text.parse::<IpAddr>().unwrap()).partition(IpAddr::is_ipv6);
        for (record_type, addresses) in [(RecordType::A, v4), (RecordType::AAAA, v6)] {
            let none = addresses.is_empty();
            self.say(name, record_type, if none { Say::Code(ResponseCode::NoError) } else { Say::At(addresses, ttl) });
        }
    }

    /// Set the same answer for A and AAAA queries of a name.
    pub fn both(&self, name: &str, say: &Say) {
        for record_type in [RecordType::A, RecordType::AAAA] {
            self.say(name, record_type, say.clone());
        }
    }

    /// Return the times of the A queries for a name.
    pub fn asked(&self, name: &str) -> Vec<Instant> {
        let asked = self.asked.lock().unwrap();
        asked.iter().filter(|(of, kind, _)| of == name && *kind == RecordType::A).map(|(.., when)| *when).collect()
    }

    /// Return a resolver that uses this server.
    pub fn directory(&self, search: &[&str]) -> DnsResolver {
        let mut connection = ConnectionConfig::udp();
        connection.port = self.address.port();
        let server = NameServerConfig::new(self.address.ip(), true, vec![connection]);
        let mut config = ResolverConfig::from_name_servers(vec![server]);
        search.iter().for_each(|domain| config.add_search(domain.parse().unwrap()));
        let mut options = ResolverOpts::default();
        // No packet is lost on loopback, so silence is detected early.
        options.timeout = PATIENCE / 40;
        options.attempts = 1;
        DnsResolver::Servers(Box::new(config), Box::new(options))
    }
}
