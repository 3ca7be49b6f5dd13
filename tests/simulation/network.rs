//! The network between the gateways and the store, and the faults of both, in virtual time.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::ConnectionAddr;
use sluicegate::limiter::redis::connection::{ByteStream, Dial, DialFuture};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::yield_now;
use tokio::time::{Duration, Instant, sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::random::Random;
use crate::schedule::{Fault, Incident, Schedule};
use crate::store::{SimulatedRedis, port_of};

/// The time of the store's clock at the start of a schedule: 6 s before midnight in [`TIME_ZONE`], in January 2027.
///
/// [`TIME_ZONE`]: crate::schedule::TIME_ZONE
pub const START_US: u64 = 30_000_000 * 60_000_000 - 6_000_000;

type Command = Vec<Vec<u8>>;

/// The network to the simulated store, with the store itself and a trace of events.
#[derive(Debug)]
pub struct SimulatedNetwork {
    started_at: Instant,
    node_count: usize,
    round_trip: Duration,
    jitter: Duration,
    service_us: u64,
    idle_close: Option<Duration>,
    /// For each server, the right to run a command. The waiting connections get it in the order of their commands.
    server_turns: Vec<tokio::sync::Mutex<()>>,
    state: Mutex<State>,
}

#[derive(Debug)]
pub struct State {
    pub store: SimulatedRedis,
    random: Random,
    active_incidents: Vec<Incident>,
    /// One cancellation token per server. It is cancelled while the server runs. If the server hangs, tasks wait until
    /// the token is cancelled, and then continue in their order.
    running: Vec<CancellationToken>,
    /// For each server, the time at which it will have processed all its pending requests.
    busy_until: Vec<Instant>,
    connections: BTreeMap<u64, SimulatedConnection>,
    next_connection: u64,
    /// The number of connections that each gateway has opened.
    opened_connections: BTreeMap<usize, u64>,
    /// The trace of events, if enabled.
    trace: Option<Vec<(Duration, String)>>,
}

/// The state of an open connection.
#[derive(Debug, Clone)]
struct SimulatedConnection {
    /// The number of connections that the gateway opened before this one.
    number_before: u64,
    node: usize,
    /// A token that is cancelled to end the connection at once.
    reset: CancellationToken,
    /// A token that is cancelled to end the connection after the store has run its pending commands.
    draining: CancellationToken,
    lose_requests: Arc<AtomicBool>,
    drop_replies: Arc<AtomicBool>,
}

/// The connections of one gateway to the store.
pub struct SimulatedDial {
    pub gateway: usize,
    pub network: Arc<SimulatedNetwork>,
}

impl fmt::Debug for SimulatedDial {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Way").field("gateway", &self.gateway).finish_non_exhaustive()
    }
}

impl Dial for SimulatedDial {
    fn dial(&self, address: &ConnectionAddr) -> DialFuture {
        let (gateway, world) = (self.gateway, self.network.clone());
        let is_at = |node: &usize| matches!(address, ConnectionAddr::Tcp(_, port) if *port == port_of(*node));
        let node = (0..world.node_count).find(is_at).expect("the address of a server");
        Box::pin(async move {
            let about = |incident: &&Incident| incident.affects(node);
            let delay: Duration = world.state().active_incidents.iter().filter(about).map(connect_delay).sum();
            sleep(delay + world.half_round_trip() * 2).await;
            if world.state().active_incidents.iter().filter(about).any(|incident| refuses_connections(incident.fault)) {
                world.note(|| format!("gateway {gateway}: connection refused"));
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            Ok(Box::new(world.connect(gateway, node)) as Box<dyn ByteStream>)
        })
    }
}

fn connect_delay(incident: &Incident) -> Duration {
    match incident.fault {
        Fault::SlowConnects(delay) | Fault::Delay(delay) => delay,
        _ => Duration::ZERO,
    }
}

fn refuses_connections(fault: Fault) -> bool {
    matches!(fault, Fault::RestartEmpty | Fault::RestartWithState | Fault::Failover(_) | Fault::RefuseConnects)
}

impl SimulatedNetwork {
    pub fn new(schedule: &Schedule, trace: bool) -> SimulatedNetwork {
        let state = State {
            store: SimulatedRedis::new(schedule.nodes, schedule.lua, START_US),
            random: Random::new(!schedule.seed),
            active_incidents: Vec::new(),
            running: (0..schedule.nodes).map(|_| running_token()).collect(),
            busy_until: vec![Instant::now(); schedule.nodes],
            connections: BTreeMap::new(),
            next_connection: 0,
            opened_connections: BTreeMap::new(),
            trace: trace.then(Vec::new),
        };
        SimulatedNetwork {
            started_at: Instant::now(),
            node_count: schedule.nodes,
            round_trip: schedule.round_trip,
            jitter: schedule.jitter,
            service_us: schedule.service_us,
            idle_close: schedule.idle_close,
            server_turns: (0..schedule.nodes).map(|_| tokio::sync::Mutex::default()).collect(),
            state: Mutex::new(state),
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the virtual time since the start of the schedule.
    pub fn now(&self) -> Duration {
        self.started_at.elapsed()
    }

    pub fn now_us(&self) -> u64 {
        START_US + self.now().as_micros() as u64
    }

    /// Add an event to the trace.
    pub fn note(&self, event: impl FnOnce() -> String) {
        let now = self.now();
        if let Some(trace) = &mut self.state().trace {
            trace.push((now, event()));
        }
    }

    pub fn trace(&self) -> Vec<(Duration, String)> {
        self.state().trace.take().unwrap_or_default()
    }

    /// Return half of the round-trip time, with a random jitter.
    fn half_round_trip(&self) -> Duration {
        let state = &mut *self.state();
        let jitter_us = self.jitter.as_micros() as u64;
        let jitter = if jitter_us == 0 { 0 } else { state.random.in_range(0..jitter_us) };
        (self.round_trip + Duration::from_micros(jitter)) / 2
    }

    /// Begin a fault.
    pub fn begin_fault(&self, incident: Incident) {
        self.note(|| format!("fault begins: {incident:?}"));
        let fault = incident.fault;
        let now_us = self.now_us();
        let state = &mut *self.state();
        let connections = state.connections.values().filter(|each| incident.affects(each.node));
        match fault {
            Fault::Delay(_) | Fault::DelaySome(_) | Fault::Stall(_) => {}
            Fault::LoseReplies => connections.for_each(|each| each.drop_replies.store(true, Ordering::Relaxed)),
            Fault::LoseRequests => connections.for_each(|each| each.lose_requests.store(true, Ordering::Relaxed)),
            Fault::ResetAfter => connections.for_each(|each| each.draining.cancel()),
            Fault::Hang => {
                for (_, runs) in state.running.iter_mut().enumerate().filter(|(node, _)| incident.affects(*node)) {
                    *runs = CancellationToken::new();
                }
            }
            Fault::OutOfMemory => state.store.out_of_memory = true,
            Fault::ResetBefore | Fault::RefuseConnects | Fault::SlowConnects(_) => {
                connections.for_each(|each| each.reset.cancel())
            }
            Fault::RestartEmpty | Fault::RestartWithState | Fault::Failover(_) => {
                connections.for_each(|each| each.reset.cancel());
                let loss_us = match fault {
                    Fault::RestartEmpty => None,
                    Fault::Failover(lost) => Some(lost.as_micros() as u64),
                    _ => Some(0),
                };
                state.store.restart(now_us, loss_us);
            }
        }
        state.active_incidents.push(incident);
    }

    /// End a fault.
    pub fn end_fault(&self, incident: Incident) {
        self.note(|| format!("fault ends: {incident:?}"));
        let mut state = self.state();
        state.active_incidents.retain(|active| *active != incident);
        state.store.out_of_memory = state.active_incidents.iter().any(|active| active.fault == Fault::OutOfMemory);
        let hangs =
            |node| state.active_incidents.iter().any(|active| active.fault == Fault::Hang && active.affects(node));
        for (_, runs) in state.running.iter().enumerate().filter(|(node, _)| !hangs(*node)) {
            runs.cancel();
        }
    }

    fn connect(self: &Arc<Self>, gateway: usize, node: usize) -> DuplexStream {
        let (gateway_side, store_side) = tokio::io::duplex(1 << 22);
        let (number, connection) = {
            let state = &mut *self.state();
            let has = |fault| state.active_incidents.iter().any(|active| active.fault == fault && active.affects(node));
            let flag = |fault| Arc::new(AtomicBool::new(has(fault)));
            let opened = state.opened_connections.entry(gateway).or_default();
            *opened += 1;
            let connection = SimulatedConnection {
                number_before: *opened - 1,
                node,
                reset: CancellationToken::new(),
                draining: CancellationToken::new(),
                lose_requests: flag(Fault::LoseRequests),
                drop_replies: flag(Fault::LoseReplies),
            };
            state.next_connection += 1;
            state.connections.insert(state.next_connection, connection.clone());
            (state.next_connection, connection)
        };
        self.note(|| format!("gateway {gateway}: connection {number} open"));
        let (read_half, write_half) = tokio::io::split(store_side);
        let ((to_store, commands), (to_gateway, replies)) = (unbounded_channel(), unbounded_channel());
        let world = self.clone();
        tokio::spawn(async move {
            let served = async {
                tokio::join!(
                    world.deliver_commands(read_half, &connection, to_store),
                    world.run_commands((gateway, node, number), &connection, commands, to_gateway),
                    world.deliver_replies(write_half, &connection, replies),
                );
            };
            tokio::select! {
                biased;
                () = connection.reset.cancelled() => {}
                () = served => {}
            }
            world.state().connections.remove(&number);
            world.note(|| format!("gateway {gateway}: connection {number} closed"));
        });
        gateway_side
    }

    /// Read commands from a gateway. Each command reaches the store half a round trip later.
    async fn deliver_commands(
        &self,
        mut read_half: ReadHalf<DuplexStream>,
        connection: &SimulatedConnection,
        to_store: UnboundedSender<(Instant, Command)>,
    ) {
        let (mut bytes, mut arrives_at) = (Vec::new(), Instant::now());
        loop {
            while let Some((command, length)) = parse_command(&bytes) {
                bytes.drain(..length);
                arrives_at = arrives_at.max(Instant::now() + self.half_round_trip() + self.request_delay());
                if !connection.lose_requests.load(Ordering::Relaxed) {
                    let _ = to_store.send((arrives_at, command));
                }
            }
            match read_half.read_buf(&mut bytes).await {
                Ok(1..) => {}
                Ok(0) | Err(_) => return,
            }
        }
    }

    fn request_delay(&self) -> Duration {
        let delay = |active: &Incident| if let Fault::Delay(delay) = active.fault { delay } else { Duration::ZERO };
        self.state().active_incidents.iter().map(delay).sum()
    }

    fn reply_delay(&self, connection: &SimulatedConnection) -> Duration {
        let delay = |active: &Incident| match active.fault {
            // The first connection for calls and the connection for PING are prompt.
            Fault::DelaySome(delay) if connection.number_before % 4 >= 2 => delay,
            _ => Duration::ZERO,
        };
        self.state().active_incidents.iter().map(delay).sum()
    }

    /// Run the commands of a connection in order.
    async fn run_commands(
        &self,
        (gateway, node, number): (usize, usize, u64),
        connection: &SimulatedConnection,
        mut commands: UnboundedReceiver<(Instant, Command)>,
        to_gateway: UnboundedSender<(Instant, Vec<u8>)>,
    ) {
        let mut arrives_at = Instant::now();
        loop {
            let command = tokio::select! {
                biased;
                command = commands.recv() => command,
                () = connection.draining.cancelled() => None,
                () = self.idle_timeout() => {
                    self.note(|| format!("gateway {gateway}: the store closes the idle connection {number}"));
                    None
                }
            };
            let Some((at, command)) = command else {
                connection.reset.cancel();
                return;
            };
            sleep_until(at).await;
            let running = self.state().running[node].clone();
            running.cancelled().await;
            // The server runs one command at a time, and its connections in turn. Timers have a resolution of 1 ms, so a
            // command may run up to 1 ms too early, but it still delays the commands after it by its whole time.
            let turn = self.server_turns[node].lock().await;
            let until = self.state().busy_until[node];
            if until > Instant::now() + Duration::from_millis(1) {
                sleep_until(until).await;
            }
            let (reply, done_at) = {
                let (now, now_us) = (Instant::now(), self.now_us());
                let state = &mut *self.state();
                let before = state.store.history.len();
                let written = state.store.overrides.len();
                let (reply, work) = state.store.run(now_us, gateway, node, &command);
                state.busy_until[node] =
                    state.busy_until[node].max(now) + Duration::from_micros(self.service_us * work);
                if let Some(trace) = &mut state.trace {
                    for written in &state.store.overrides[written..] {
                        trace.push((self.started_at.elapsed(), format!("store: {written:?}")));
                    }
                    for done in &state.store.history[before..] {
                        let asked = done.charges.iter().map(|asked| {
                            let lease = if asked.permit_id == 0 {
                                String::new()
                            } else {
                                format!(" permit {:x}", asked.permit_id)
                            };
                            format!("{} of {:04x}, {} units{lease}", asked.state.0, asked.state.1 as u16, asked.cost)
                        });
                        let asked = asked.collect::<Vec<_>>().join("; ");
                        let event = format!(
                            "store: gateway {gateway}, {:?} {asked}: granted {}",
                            done.operation, done.verdict.granted
                        );
                        trace.push((self.started_at.elapsed(), event));
                    }
                    if before == state.store.history.len() && work > 0 {
                        trace.push((self.started_at.elapsed(), format!("store: gateway {gateway}, error reply")));
                    }
                }
                (reply, state.busy_until[node].max(now))
            };
            drop(turn);
            arrives_at = arrives_at.max(done_at + self.half_round_trip() + self.reply_delay(connection));
            if !connection.draining.is_cancelled() {
                let _ = to_gateway.send((arrives_at, reply));
            }
        }
    }

    /// Wait for the idle time after which the store closes a connection. If the store does not close idle connections,
    /// wait forever.
    async fn idle_timeout(&self) {
        let Some(idle) = self.idle_close else { return std::future::pending().await };
        sleep(idle).await;
        // If a command arrives at the same time, run it before the connection is closed. If the connection were closed
        // while the command was in flight, the gateway could not know whether the store has run it.
        for _ in 0..100 {
            yield_now().await;
        }
    }

    async fn deliver_replies(
        &self,
        mut write_half: WriteHalf<DuplexStream>,
        connection: &SimulatedConnection,
        mut replies: UnboundedReceiver<(Instant, Vec<u8>)>,
    ) {
        while let Some((at, reply)) = replies.recv().await {
            // Replies in flight at the end of the connection are lost.
            let is_lost = timeout_at(at, connection.draining.cancelled()).await.is_ok();
            if !is_lost
                && !connection.drop_replies.load(Ordering::Relaxed)
                && write_half.write_all(&reply).await.is_err()
            {
                return;
            }
        }
    }
}

/// Return the token of a running server, for [`State::running`].
fn running_token() -> CancellationToken {
    let runs = CancellationToken::new();
    runs.cancel();
    runs
}

/// Return the first command in `bytes` and its length in bytes. A command is an array of bulk strings.
fn parse_command(bytes: &[u8]) -> Option<(Command, usize)> {
    let mut offset = 0;
    let line = |mark: u8, at: &mut usize| {
        let end = *at + bytes.get(*at..)?.iter().position(|byte| *byte == b'\r')?;
        assert_eq!(bytes[*at], mark, "a command");
        let number: usize = std::str::from_utf8(&bytes[*at + 1..end]).ok()?.parse().ok()?;
        *at = end + 2;
        Some(number)
    };
    let count = line(b'*', &mut offset)?;
    let mut arguments = Vec::with_capacity(count);
    for _ in 0..count {
        let length = line(b'$', &mut offset)?;
        arguments.push(bytes.get(offset..offset + length)?.to_vec());
        offset += length + 2;
    }
    (offset <= bytes.len()).then_some((arguments, offset))
}
