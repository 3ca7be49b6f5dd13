"""packages.py DIST FOLDER [CHECK…]: check the packages in DIST, in root file systems below FOLDER. Requires root and the programs that
`make test-packages` installs.

The deb and the rpm are installed into a minimal Debian, which is created once. Its systemd runs for the check of upgrades only, in
namespaces. The other checks verify the units and start the program as the units would.
"""

import contextlib
import fnmatch
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request


HERE = pathlib.Path(__file__).parent
DIST, FOLDER = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
CONFFILE = pathlib.PurePath("etc/sluicegate/gateway.toml")
# Files of the package managers, and the copies that passwd makes before a change.
DATABASES = ("var/lib/dpkg", "var/lib/rpm", "usr/lib/sysimage/rpm", "var/log/dpkg.log", "var/cache", "root/.rpmdb", "etc/.pwd.lock")
BACKUPS = {"etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-"}


def run(*command, ok=True, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if ok and done.returncode != 0:
        sys.exit(f"{' '.join(str(part) for part in command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def one(pattern):
    found = list(DIST.glob(pattern))
    assert len(found) == 1, f"{DIST}/{pattern}: {found}"
    return found[0]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
        return response.status, response.read().decode()


def configuration(port, admin):
    return (
        f'[[listener]]\naddress = "127.0.0.1:{port}"\n[admin]\naddress = "127.0.0.1:{admin}"\n'
        '[client_ip]\ntrusted_proxies = []\n[limit.ip]\nby = "ip"\nquota = "3/day"\n'
        '[[route]]\nname = "r"\npath = "/r"\nlimits = ["ip"]\nrespond = { status = 200, body = "served" }\n'
    )


@contextlib.contextmanager
def served(command, admin):
    """Start a gateway, wait until it is ready, and send SIGTERM. Check that it ends."""
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                if get(admin, "/readyz")[0] == 200:
                    break
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        else:
            sys.exit(f"{command}: not ready")
        yield process
    finally:
        process.terminate()
        assert process.wait(timeout=20) in (0, 143), process.stdout.read()


def exceeds_its_limit(port):
    statuses = []
    for _ in range(4):
        try:
            statuses.append(get(port, "/r")[0])
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
    assert statuses == [200, 200, 200, 429], statuses


def checksums():
    lines = (DIST / "SHA256SUMS").read_text().splitlines()
    named = {line.split("  ")[1]: line.split("  ")[0] for line in lines}
    assert set(named) == {path.name for path in DIST.glob("sluicegate[-_]*")}, named
    for name, digest in named.items():
        assert hashlib.sha256((DIST / name).read_bytes()).hexdigest() == digest, name
    run("sha256sum", "--check", "SHA256SUMS", cwd=DIST)
    print(f"SHA256SUMS: {len(named)} files")


def contents():
    """The files of DIST are those of the table in docs/how-to/install.md."""
    text = (HERE.parent.parent / "docs/how-to/install.md").read_text()
    names = re.findall(r"^\| `(sluicegate[^`]+)` \|", text, re.M)
    assert len(names) >= 7, names
    patterns = [name.replace("VERSION", "*").replace("…", "*").replace("x86_64", "*").replace("amd64", "*") for name in names]
    files = {path.name for path in DIST.iterdir() if path.is_file()} - {"SHA256SUMS", "sluicegate"}
    for pattern in patterns:
        found = fnmatch.filter(files, pattern)
        # The counts are part of a build with PGO.
        assert found or pattern.endswith(".profdata"), f"{DIST} has no {pattern}"
        files -= set(found)
    assert not files, f"install.md does not name {files}"
    print(f"{DIST}: the files of install.md")


# Maximum numbers of user instructions of a build with PGO: for a request without a limit, for one that a limit in Redis
# denies, and for a decision. Builds without PGO need more, and so does code without training.
PGO_INSTRUCTIONS = {"plain": 27_000, "deny": 18_500, "decide/plain": 19_900}


def pgo(program):
    """A build that says that it was built with PGO needs fewer instructions."""
    if "PGO: yes" not in run(program, "--version").stdout:
        print("not built with PGO")
        return
    for route, most in PGO_INSTRUCTIONS.items():
        out = run(sys.executable, HERE.parent.parent / "benches/compare/instructions.py", program, "--route", route).stdout
        count = int(re.search(r"^\S.* ([\d,]+)$", out, re.M)[1].replace(",", ""))
        assert count <= most, f"{route}: {count:,} instructions, at most {most:,} with PGO"
        print(f"PGO: {count:,} instructions for {route}")


def uses_mimalloc(program):
    """Check that mimalloc replaces malloc of libc: its statistics at the exit count pages. This also works for static binaries, which
    have no dynamic symbols."""
    statistics = run(program, "--version", env=os.environ | {"MIMALLOC_SHOW_STATS": "1"}).stderr
    pages = re.search(r"^ *pages *: +[0-9]+ +([0-9]+)", statistics, re.MULTILINE)
    assert pages and int(pages[1]) > 0, f"{program} does not allocate with mimalloc: {statistics}"


def tarball():
    folder = FOLDER / "tarball"
    with tarfile.open(one("*.tar.gz")) as archive:
        names = archive.getnames()
        assert names == sorted(names, key=lambda name: name.split("/")), "the entries are sorted"
        assert {(entry.uid, entry.gid) for entry in archive} == {(0, 0)}
        assert len({entry.mtime for entry in archive}) == 1
        archive.extractall(folder, filter="data")
    [top] = folder.iterdir()
    uses_mimalloc(top / "sluicegate")
    port, admin = free_port(), free_port()
    (folder / "gateway.toml").write_text(configuration(port, admin))
    run(top / "sluicegate", "check", "--config", top / "gateway.toml")
    with served([top / "sluicegate", "--config", folder / "gateway.toml"], admin):
        exceeds_its_limit(port)
        run(top / "sluicegate", "probe", "--config", folder / "gateway.toml")
    print(f"{one('*.tar.gz').name}: {len(names)} entries; serves")
    return top / "sluicegate"


# === deb and rpm, in a separate root file system ===


def make_root(name):
    """Return a fresh root file system: a copy of a minimal Debian with systemd."""
    base = FOLDER / "base.tar"
    if not base.exists():
        sandbox = 'APT::Sandbox::User "root"'
        run("mmdebstrap", "--mode=root", f"--aptopt={sandbox}", "--variant=minbase", "--include=systemd,passwd", "bookworm", base)
    root = FOLDER / name
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    run("tar", "--extract", "--file", base, "--directory", root, "--exclude=./dev/*")
    os.mknod(root / "dev/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    return root


def inside(root, *command, **options):
    return run("chroot", root, *command, **options)


def files(root):
    """Return the content of each file in a root file system, except for the databases of package managers."""
    found = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if name.startswith(DATABASES) or name in BACKUPS:
            continue
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
    return found


def difference(before, after):
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def newer_deb(deb, version, change=False, program=None):
    """Return a deb with a higher version and, if `change` is set, with another configuration file. `program` replaces the binary."""
    folder = FOLDER / "newer"
    shutil.rmtree(folder, ignore_errors=True)
    run("dpkg-deb", "--raw-extract", deb, folder)
    control = folder / "DEBIAN/control"
    control.write_text("\n".join(
        f"Version: {version}" if line.startswith("Version: ") else line for line in control.read_text().splitlines()
    ) + "\n")
    if change:
        (folder / CONFFILE).write_text((folder / CONFFILE).read_text() + "# another default\n")
    if program:
        (folder / "usr/bin/sluicegate").write_text(program)
    newer = FOLDER / f"newer-{version}.deb"
    run("dpkg-deb", "--build", "--root-owner-group", "-Znone", folder, newer)
    return newer


def installed_service(root):
    """Check the account and the files that both packages install. Return the version of the program."""
    version = inside(root, "/usr/bin/sluicegate", "--version").stdout.split()[1]
    passwd = (root / "etc/passwd").read_text()
    assert "\nsluicegate:" in passwd and "nologin" in passwd.split("\nsluicegate:")[1].splitlines()[0], passwd
    assert "\nsluicegate:" in (root / "etc/group").read_text()
    inside(root, "/usr/bin/sluicegate", "check", "--config", f"/{CONFFILE}")
    unit = (root / "usr/lib/systemd/system/sluicegate.service").read_text()
    assert "ExecStart=/usr/bin/sluicegate " in unit and "DynamicUser" not in unit and "\nUser=sluicegate\n" in unit
    units = [root / "usr/lib/systemd/system" / name for name in ("sluicegate.service", "sluicegate.socket")]
    verified = run("systemd-analyze", "verify", f"--root={root}", "--man=no", *(f"/{unit.relative_to(root)}" for unit in units))
    complaints = [line for line in verified.stderr.splitlines() if "sluicegate" in line]
    assert not complaints, complaints
    for name in ("man/man1/sluicegate.1.gz", "man/man1/sluicegate-key-new.1.gz"):
        assert gzip.decompress((root / "usr/share" / name).read_bytes()).startswith(b".ie"), name
    for name in ("bash-completion/completions/sluicegate", "fish/vendor_completions.d/sluicegate.fish"):
        assert "sluicegate" in (root / "usr/share" / name).read_text(), name
    assert list((root / "usr/share/zsh").rglob("_sluicegate"))
    assert "su sluicegate sluicegate" in (root / "etc/logrotate.d/sluicegate").read_text()
    return version


def deb():
    package = one("*.deb")
    found = run("lintian", "--allow-root", "--fail-on", "error", package)
    warnings = len([line for line in found.stdout.splitlines() if line.startswith("W:")])
    root = make_root("deb")
    before = files(root)
    shutil.copy(package, root / "tmp/sluicegate.deb")
    inside(root, "dpkg", "--install", "/tmp/sluicegate.deb")
    version = installed_service(root)
    assert 'protocol = "ratelimit"' in inside(root, "/bin/ratelimit", "--print").stdout
    assert gzip.decompress((root / "usr/share/man/man1/ratelimit.1.gz").read_bytes()).startswith(b".ie")

    # An upgrade keeps an edited configuration file, even if the package contains another version of it.
    edited = (root / CONFFILE).read_text() + "# edited\n"
    (root / CONFFILE).write_text(edited)
    for newer, change in (("2.0.0-1", False), ("3.0.0-1", True)):
        shutil.copy(newer_deb(package, newer, change), root / "tmp/newer.deb")
        inside(root, "dpkg", "--force-confdef", "--force-confold", "--install", "/tmp/newer.deb")
        assert (root / CONFFILE).read_text() == edited, f"the upgrade to {newer} replaced the configuration"
    assert "another default" in (root / f"{CONFFILE}.dpkg-dist").read_text()

    # `remove` keeps the files of the administrator, `purge` deletes only the configuration.
    (root / "etc/sluicegate/environment").write_text("SLUICEGATE_ADMIN_TOKEN=x\n")
    for folder in ("var/lib/sluicegate", "var/log/sluicegate"):
        (root / folder).mkdir()
        (root / folder / "file").touch()
    key = root / "etc/sluicegate/tls.key"
    key.write_text("secret")
    inside(root, "systemctl", "enable", "sluicegate.service")
    inside(root, "dpkg", "--remove", "sluicegate")
    assert (root / CONFFILE).read_text() == edited and not (root / "usr/bin/sluicegate").exists()
    inside(root, "dpkg", "--purge", "sluicegate")
    assert list(key.parent.iterdir()) == [key], "purge deletes a key of the administrator"
    key.unlink()
    key.parent.rmdir()
    for name in ("tmp/sluicegate.deb", "tmp/newer.deb"):
        (root / name).unlink()
    left = difference(before, files(root))
    assert not left, f"purge leaves {left}"
    print(f"{package.name}: lintian has no error ({warnings} warnings); installs {version}, upgrades, purges")


# Starts the systemd of the root file system in the working directory, as the first process of new namespaces.
BOOT = """
mount --make-rprivate / && mount --bind . . && cd "$PWD" && mount -t proc proc proc && mount -t sysfs sysfs sys
for folder in run tmp dev; do mount -t tmpfs tmpfs $folder; done
mkdir dev/pts dev/shm && mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts && ln -s pts/ptmx dev/ptmx
mknod -m 666 dev/null c 1 3; mknod -m 666 dev/zero c 1 5; mknod -m 666 dev/full c 1 7
mknod -m 666 dev/random c 1 8; mknod -m 666 dev/urandom c 1 9; mknod -m 666 dev/tty c 5 0
mount -t cgroup2 cgroup2 sys/fs/cgroup && [ -e sys/fs/cgroup/cgroup.procs ] && grep -q . sys/fs/cgroup/cgroup.controllers || {
  mount -t tmpfs tmpfs sys/fs/cgroup && mkdir sys/fs/cgroup/systemd && mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
}
pivot_root . mnt && umount -l /mnt && exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd
"""


@contextlib.contextmanager
def booted(root):
    """Run the systemd of a root file system. Yield a function that runs a command there."""
    namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--cgroup"]
    boot = subprocess.Popen([*namespaces, "sh", "-c", BOOT], cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = pathlib.Path(f"/proc/{boot.pid}/task/{boot.pid}/children")

    def command(*arguments, **options):
        enter = ["nsenter", "--target", children.read_text().split()[0], "--pid", "--mount", "--uts", "--ipc", "--cgroup"]
        return run(*enter, "env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *arguments, **options)

    try:
        for _ in range(400):
            assert boot.poll() is None, "systemd does not start"
            if children.read_text() and command("systemctl", "is-system-running", ok=False).stdout in ("running\n", "degraded\n"):
                break
            time.sleep(0.05)
        else:
            sys.exit("systemd is not ready")
        yield command
    finally:
        boot.kill()
        boot.wait()


def upgrade():
    """Upgrade the deb of a running service: to a version that works, to one that does not, and to one that works again. A reload and
    the watchdog."""
    package, admin = one("*.deb"), free_port()
    root = make_root("upgrade")
    broken = "#!/bin/sh\necho this version is broken >&2\nexit 3\n"
    packages = [("2.0-1", None), ("3.0-1", broken), ("4.0-1", None)]
    shutil.copy(package, root / "root/sluicegate.deb")
    for version, program in packages:
        shutil.copy(newer_deb(package, version, program=program), root / f"root/{version}.deb")

    def results():
        page = get(admin, "/metrics")[1]
        return [int(page.split(f'hot_restarts_total{{result="{result}"}} ')[1].split()[0]) for result in ("ok", "error")]

    with booted(root) as command:
        def shown(name):
            return command("systemctl", "show", f"--property={name}", "--value", "sluicegate").stdout.strip()

        def install(name):
            done = command("dpkg", "--install", f"/root/{name}.deb", ok=False)
            return done.returncode, done.stderr

        assert install("sluicegate")[0] == 0
        file = root / CONFFILE
        file.write_text(configuration(free_port(), admin))
        command("systemctl", "start", "sluicegate")
        first = shown("MainPID")
        assert install("2.0-1")[0] == 0 and results() == [1, 0]
        second = shown("MainPID")
        assert second != first, "the new version serves"
        code, error = install("3.0-1")
        assert code == 1 and "hot restart failed: the new process exited" in error, error
        assert "half-configured" in command("dpkg", "--status", "sluicegate").stdout
        assert results() == [1, 1] and shown("MainPID") == second, "the old version serves"
        assert "this version is broken" in command("journalctl", "--unit", "sluicegate").stdout
        assert install("4.0-1")[0] == 0 and results() == [1, 0] and shown("MainPID") != second

        # `reload` fails with the reason, and the gateway serves on.
        text = file.read_text()
        file.write_text(text.replace("quota", "quotta"))
        rejected = command("systemctl", "reload", "sluicegate", ok=False)
        assert rejected.returncode == 1 and get(admin, "/readyz")[0] == 200
        assert "did you mean `quota`" in command("journalctl", "--unit", "sluicegate", "--output=cat").stdout
        file.write_text(text)
        command("systemctl", "reload", "sluicegate")

        # A process that does not run is restarted.
        command("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "sluicegate")
        for _ in range(600):
            if shown("NRestarts") == "1" and shown("ActiveState") == "active":
                break
            time.sleep(0.1)
        else:
            sys.exit("the watchdog does not restart the service")
        assert get(admin, "/readyz")[0] == 200
    print(f"{package.name}: upgrades of a running service under systemd, also to a version that does not start")


def rpm():
    package = one("*.rpm")
    assert "digests" in run("rpm", "--checksig", "--nosignature", package).stdout
    scripts = run("rpm", "--query", "--scripts", "--package", package).stdout
    for kind in ("preinstall", "postinstall", "preuninstall", "postuninstall"):
        assert f"{kind} scriptlet" in scripts, scripts
    configuration_files = run("rpm", "--query", "--configfiles", "--package", package).stdout.split()
    assert configuration_files == ["/etc/logrotate.d/sluicegate", f"/{CONFFILE}"], configuration_files
    root = make_root("rpm")
    before = files(root)
    # The root file system is a Debian, so the rpm database has no packages that could satisfy the dependencies.
    options = ["--root", root, "--nodeps", "--dbpath", "/var/lib/rpm"]
    run("rpm", *options, "--install", package)
    version = installed_service(root)
    assert 'protocol = "ratelimit"' in inside(root, "/bin/ratelimit", "--print").stdout
    (root / CONFFILE).write_text("# edited\n")
    run("rpm", *options, "--upgrade", "--replacepkgs", package)
    assert (root / CONFFILE).read_text() == "# edited\n", "the upgrade replaced the configuration"
    run("rpm", *options, "--erase", "sluicegate")
    # rpm keeps an edited configuration file under another name. Accounts are never removed.
    saved = root / f"{CONFFILE}.rpmsave"
    assert saved.read_text() == "# edited\n"
    left = difference(before, files(root))
    accounts = {"etc/passwd", "etc/group", "etc/shadow", "etc/gshadow", "etc/subuid", "etc/subgid"}
    # Directories that exist on systems with rpm.
    common = {"usr/share/licenses", "usr/share/fish", "usr/share/fish/vendor_completions.d", "usr/share/zsh/site-functions"}
    assert set(left) - accounts - common == {"etc/sluicegate", str(saved.relative_to(root))}, left
    requires = run("rpm", "--query", "--requires", "--package", package).stdout
    glibc = max((tuple(map(int, name.split("GLIBC_")[1].split(")")[0].split("."))) for name in requires.split() if "GLIBC_" in name))
    print(f"{package.name}: digests and scripts; installs {version}, upgrades, removes; needs glibc {'.'.join(map(str, glibc))}")


# === image ===


def image():
    archive = one("*.oci.tar")
    layout, root = FOLDER / "layout", FOLDER / "image"
    for folder in (layout, root):
        shutil.rmtree(folder, ignore_errors=True)
    run("skopeo", "inspect", f"oci-archive:{archive}")
    run("skopeo", "inspect", f"docker-archive:{archive}")
    with tarfile.open(archive) as tar:
        tar.extractall(layout, filter="data")

    def blob(described):
        content = (layout / "blobs" / described["digest"].replace(":", "/")).read_bytes()
        assert hashlib.sha256(content).hexdigest() == described["digest"].split(":")[1]
        assert len(content) == described["size"]
        return content

    [manifest] = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(blob(manifest))
    config = json.loads(blob(manifest["config"]))
    for described, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        content = gzip.decompress(blob(described))
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == diff_id
        root.mkdir(exist_ok=True)
        subprocess.run(["tar", "--extract", "--directory", str(root)], input=content, check=True)
    programs = sorted(str(path.relative_to(root)) for path in root.rglob("bin/*"))
    assert programs == ["bin/ratelimit", "usr/bin/sluicegate"], f"the image has other programs, such as a shell: {programs}"
    settings = config["config"]
    user, group = settings["User"].split(":")
    assert user != "0"
    port, admin = free_port(), free_port()
    mounted = FOLDER / "configuration"
    mounted.mkdir(exist_ok=True)
    (mounted / "gateway.toml").write_text(configuration(port, admin))
    # Run the image as its config says, with its user, environment, working directory and entry point, in a read-only root file system.
    sandbox = [
        "bwrap", "--ro-bind", root, "/", "--dev", "/dev", "--proc", "/proc", "--ro-bind", mounted, "/etc/sluicegate",
        "--unshare-all", "--share-net", "--uid", user, "--gid", group, "--clearenv", "--chdir", settings["WorkingDir"],
        "--die-with-parent",
    ]
    for variable in settings["Env"]:
        sandbox += ["--setenv", *variable.split("=", 1)]
    entrypoint = settings["Entrypoint"]
    checked = run(*sandbox, *entrypoint, "check", "--strict").stdout
    assert "valid" in checked, checked
    assert 'protocol = "ratelimit"' in run(*sandbox, "/bin/ratelimit", "--print").stdout
    health = settings["Healthcheck"]["Test"]
    assert health[0] == "CMD"
    assert run(*sandbox, *health[1:], ok=False).returncode == 1, "without a gateway the health check fails"
    gateway = subprocess.Popen([str(part) for part in [*sandbox, *entrypoint]], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(200):
            if run(*sandbox, *health[1:], ok=False).returncode == 0:
                break
            assert gateway.poll() is None, gateway.stderr.read()
            time.sleep(0.05)
        else:
            sys.exit("the health check of the image does not succeed")
        exceeds_its_limit(port)
        run(*sandbox, *entrypoint, "status")
    finally:
        gateway.kill()
        gateway.wait()
    size = archive.stat().st_size / 1e6
    print(f"{archive.name}: {size:.1f} MB, user {user}; serves in a read-only root, and its health check succeeds")


def chart(sluicegate):
    """tests/ops/chart.py renders the chart of `make test-ops`; here it renders the archive of the release."""
    repository = HERE.parent.parent
    # The rules of the chart need no promtool: `true` accepts them.
    arguments = [sluicegate, repository / "target/ops/helm/helm", "true", one("*-chart.tgz"), FOLDER / "chart"]
    print(run(sys.executable, "-B", repository / "tests/ops/chart.py", *arguments).stdout, end="")


def sbom():
    bom = json.loads(one("*.cdx.json").read_text())
    assert bom["bomFormat"] == "CycloneDX" and bom["metadata"]["component"]["name"] == "sluicegate"
    locked = (HERE.parent.parent / "Cargo.lock").read_text()
    for component in bom["components"]:
        entry = f'name = "{component["name"]}"\nversion = "{component["version"]}"\n'
        assert entry in locked, component
        assert component["licenses"] and component["hashes"], component
    names = {component["name"] for component in bom["components"]}
    assert {"hyper", "rustls", "aws-lc-sys", "mimalloc"} <= names and "criterion" not in names
    assert str(HERE.parent.parent) not in one("*.cdx.json").read_text(), "a path of this machine"
    print(f"SBOM: {len(names)} crates")


def reproducible(sluicegate):
    again = FOLDER / "again"
    shutil.rmtree(again, ignore_errors=True)
    profile = list(DIST.glob("*.profdata"))
    environment = os.environ | {"PATH": f"{HERE.parent.parent}/target/packaging/bin:{os.environ['PATH']}"}
    environment |= {"PROFDATA": str(profile[0])} if profile else {}
    run(HERE.parent.parent / "packaging/package.sh", sluicegate, again, env=environment)
    for line in (DIST / "SHA256SUMS").read_text().splitlines():
        assert line in (again / "SHA256SUMS").read_text().splitlines(), f"packed twice, {line.split('  ')[1]} differs"
    print("packed twice: the same bytes")


def tag():
    """Run `make tag` in a clone. Check what it rejects, and the message of the tag."""
    clone = FOLDER / "clone"
    shutil.rmtree(clone, ignore_errors=True)
    run("git", "clone", "--quiet", HERE.parent.parent, clone)
    for setting in ("user.name=Packages", "user.email=packages@example.test"):
        run("git", "config", *setting.split("="), cwd=clone)
    version = run(clone / "packaging/version.sh").stdout.strip()

    def rejected(why):
        refused = run(clone / "packaging/tag.sh", ok=False)
        assert refused.returncode == 1 and why in refused.stderr, refused.stderr

    changelog = clone / "CHANGELOG.md"
    if f"## {version} (" not in changelog.read_text():
        rejected(f"CHANGELOG.md has no section `## {version}")
        changelog.write_text(changelog.read_text().replace("## Unreleased\n", f"## Unreleased\n\n## {version} (2027-01-02)\n", 1))
        rejected("the work tree has changes")
        run("git", "commit", "--quiet", "--all", "--message", "release", cwd=clone)
    if run("git", "tag", "--list", f"v{version}", cwd=clone).stdout:
        run("git", "tag", "--delete", f"v{version}", cwd=clone)
    fixtures = clone / "tests/fixtures" / version
    run("git", "mv", fixtures, fixtures.with_name("0.9.0"), cwd=clone)
    run("git", "commit", "--quiet", "--message", "fixtures of another release", cwd=clone)
    rejected("run `make fixtures`")
    run("git", "reset", "--quiet", "--hard", "HEAD~1", cwd=clone)
    run(clone / "packaging/tag.sh")
    message = run("git", "tag", "--list", "--format=%(contents)", f"v{version}", cwd=clone).stdout
    after_heading = changelog.read_text().split(f"\n## {version} (", 1)[1].split("\n", 1)[1]
    section = re.split(r"^## ", after_heading, maxsplit=1, flags=re.MULTILINE)[0]
    assert section.strip().startswith("### Added\n")
    assert message.strip() == f"Sluicegate {version}\n\n{section.strip()}", message[:200]
    rejected(f"the tag v{version} exists")
    print(f"tag: v{version} has its section of the changelog")


shutil.rmtree(FOLDER / "tarball", ignore_errors=True)
FOLDER.mkdir(parents=True, exist_ok=True)
program = tarball()
checks = {
    "contents": contents, "pgo": lambda: pgo(program), "checksums": checksums, "sbom": sbom, "deb": deb, "upgrade": upgrade, "rpm": rpm, "image": image,
    "chart": lambda: chart(program), "tag": tag, "reproducible": lambda: reproducible(program),
}
for name in sys.argv[3:] or checks:
    checks[name]()
