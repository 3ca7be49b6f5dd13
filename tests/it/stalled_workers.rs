//! Workers that do not run any more: `/healthz`, `/readyz`, the metric, and the watchdog of systemd.

use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::admin_listener::{ask, metric, with_admin};
use crate::support::gateway::{Gateway, binary};
use crate::support::reload::says;
use crate::support::{MAX_WAIT, eventually};

/// Runs the gateway as its child, which ends with it, and stops the thread with the name of each line that it reads: it
/// attaches to the thread with ptrace(2). An empty line lets the thread run again. A parent needs no permission for this.
const STOPPER: &str = r#"
import ctypes, os, pathlib, signal, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, SEIZE, INTERRUPT, DETACH, WALL = 1, 0x4206, 0x4207, 17, 0x40000000
def trace(request, thread):
    if libc.ptrace(request, thread, None, None) != 0:
        sys.exit(f"ptrace {request:#x}: {os.strerror(ctypes.get_errno())}")
die = lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
gateway = subprocess.Popen(sys.argv[1:], preexec_fn=die, stdin=subprocess.DEVNULL)
for line in sys.stdin:
    if name := line.strip():
        tasks = pathlib.Path(f"/proc/{gateway.pid}/task").iterdir()
        thread = next(int(task.name) for task in tasks if (task / "comm").read_text().strip() == name)
        trace(SEIZE, thread)
        trace(INTERRUPT, thread)
        os.waitpid(thread, WALL)
    else:
        trace(DETACH, thread)
"#;

#[test]
fn stalled_worker_is_visible_and_the_watchdog_is_not_notified() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let told = |within: Duration| {
        socket.set_read_timeout(Some(within)).unwrap();
        let mut message = [0; 512];
        let length = socket.recv(&mut message).map_err(|error| error.kind())?;
        Ok::<_, ErrorKind>(String::from_utf8_lossy(&message[..length]).trim().to_owned())
    };
    let config = with_admin(&format!("[server]\nworkers = 2\n{}", says("one")));
    let mut gateway = Gateway::start_socket(&config, |config| {
        let mut command = Command::new("python3");
        command.args(["-c", STOPPER]).arg(binary().get_program()).arg("--config").arg(config).stdin(Stdio::piped());
        command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "2000000");
        command
    });
    let mut stopper = gateway.child.stdin.take().unwrap();
    assert_eq!(told(MAX_WAIT).as_deref(), Ok("READY=1"));
    assert_eq!(told(MAX_WAIT).as_deref(), Ok("WATCHDOG=1"));
    assert_eq!((ask(&gateway, "/healthz").status, ask(&gateway, "/readyz").status), (200, 200));
    assert!(metric(&gateway, "sluicegate_worker_heartbeat_age_seconds{worker=\"1\"}") < 10.0);

    stopper.write_all(b"worker-1\n").unwrap();
    eventually("/healthz is 503", || ask(&gateway, "/healthz").status == 503);
    let health = ask(&gateway, "/healthz").text().to_owned();
    assert!(health.starts_with("worker 1 has not run its tasks for 1"), "{health}");
    let ready = ask(&gateway, "/readyz");
    assert_eq!((ready.status, &ready.json()["status"]), (503, &"stalled".into()));
    let age =
        |worker: &str| metric(&gateway, &format!("sluicegate_worker_heartbeat_age_seconds{{worker=\"{worker}\"}}"));
    assert!(age("1") >= 10.0 && age("0") < 10.0, "{} and {}", age("1"), age("0"));
    // Read the notifications that were sent before. Then none may arrive for longer than their interval of 1 s.
    while told(Duration::from_millis(1)).is_ok() {}
    assert_eq!(told(Duration::from_secs(3)), Err(ErrorKind::WouldBlock), "systemd would not restart the gateway");

    stopper.write_all(b"\n").unwrap();
    eventually("/healthz is 200", || ask(&gateway, "/healthz").status == 200);
    assert_eq!(ask(&gateway, "/readyz").json()["status"], "ready");
    assert_eq!(told(MAX_WAIT).as_deref(), Ok("WATCHDOG=1"));
}
