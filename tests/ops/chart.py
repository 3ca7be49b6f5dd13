"""Render the Helm chart with each file of tests/ops/values, check the result by the Kubernetes schemas, and start the gateway and the
Redis that it describes.

    chart.py BINARY HELM PROMTOOL CHART_ARCHIVE FOLDER
"""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/clients"))
from gateway import CERTIFICATE, KEY, Gateway, expect  # noqa: E402

BINARY, HELM, PROMTOOL, ARCHIVE, FOLDER = sys.argv[1:]
FOLDER = pathlib.Path(FOLDER).resolve()
VALUES = ROOT / "tests/ops/values"
# An old and a current version of Kubernetes.
VERSIONS = ["1.27", "1.37"]
# The Secret of the value files with `existingSecret`.
EXISTING = {"admin-token": "0c7d9e5b3a1f2468", "store-secret": "a1b2c3d4e5f6071829", "redis-password": 'é"\\ @:/?#%$'}
CONSUMERS = '[[consumer]]\nname = "acme"\nkeys = ["sha256:' + 64 * "a" + '"]\n'
# What the volumes contain, by their paths in the container.
MOUNTED = {
    "consumers/consumers.toml": CONSUMERS,
    "networks/blocked.txt": "192.0.2.0/24\n",
    "ca/ca.crt": CERTIFICATE.read_text(),
}


def template(*arguments, ok=True):
    done = subprocess.run([HELM, "template", "edge", ARCHIVE, *arguments], capture_output=True, text=True)
    expect((done.returncode == 0) == ok, f"helm template {arguments}: {done.stdout[-500:]}{done.stderr}")
    return done.stdout if ok else done.stderr


def rendered(file, *arguments):
    documents = [each for each in yaml.safe_load_all(template("--values", file, *arguments)) if each]
    there = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    expect(len(there) == len(documents), f"{file}: two objects of one name")
    return there


def configuration(there):
    return there["ConfigMap", "edge-sluicegate"]["data"]["gateway.toml"]


def pod_of(there):
    return there["Deployment", "edge-sluicegate"]["spec"]["template"]


def restart_mark(there):
    return pod_of(there)["metadata"]["annotations"]["sluicegate/restart"]


def check_schemas(there):
    for each in there.values():
        # Custom resources have no schema in Kubernetes.
        if each["apiVersion"] != "monitoring.coreos.com/v1":
            for version in VERSIONS:
                kubernetes_validate.validate(each, version, strict=True)


def check_references(there, values):
    """Selectors must choose Pods, and ports, volumes and keys of Secrets must exist."""
    pods = [each["spec"]["template"] for each in there.values() if each["kind"] in ("Deployment", "StatefulSet")]
    ports = {}
    for pod in pods:
        for container in pod["spec"]["containers"]:
            named = {port["name"] for port in container["ports"]}
            expect(len(named) == len(container["ports"]), "two ports of one name")
            ports[pod["metadata"]["labels"]["app.kubernetes.io/name"]] = named
            volumes = [volume["name"] for volume in pod["spec"].get("volumes", [])]
            expect(sorted(mount["name"] for mount in container.get("volumeMounts", [])) == sorted(volumes), volumes)
            expect(all(len(volume) <= 63 for volume in volumes), volumes)
    for (kind, name), each in there.items():
        spec = each.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector"))
        if not selector:
            continue
        labels = selector.get("matchLabels", selector)
        targets = [each["metadata"]["labels"] for each in there.values() if each["kind"] == "Service"] if kind == "ServiceMonitor" else [
            pod["metadata"]["labels"] for pod in pods
        ]
        chosen = [target for target in targets if labels.items() <= target.items()]
        expect(len(chosen) == 1, f"{kind} {name} chooses {len(chosen)} objects")
        named = ports[chosen[0]["app.kubernetes.io/name"]]
        if kind == "Service":
            expect({port["targetPort"] for port in spec["ports"]} <= named, spec["ports"])
        if kind == "NetworkPolicy":
            expect({port["port"] for rule in spec["ingress"] for port in rule["ports"]} == named, spec)
    own = there.get(("Secret", "edge-sluicegate"), {}).get("stringData")
    expect((own is None) == ("existingSecret" in values), "the chart creates a Secret, or uses an existing one")
    for pod in pods:
        for variable in pod["spec"]["containers"][0]["env"]:
            key = variable.get("valueFrom", {}).get("secretKeyRef")
            if key:
                expect(key["name"] == values.get("existingSecret", "edge-sluicegate"), key)
                expect(key["key"] in (own or EXISTING), key)
    return own or EXISTING


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_redis(there, secret):
    """Start the Redis of the chart with its command, or another one with the same password. Return the process and its port."""
    port = free_port()
    stateful = there.get(("StatefulSet", "edge-sluicegate-redis"))
    command = ["redis-server", "--save", "", "--port", str(port)]
    if "password = " in configuration(there):
        command += ["--user", "gateway", "on", f">{secret['redis-password']}", "~*", "&*", "+@all"]
    if stateful:
        [container] = stateful["spec"]["template"]["spec"]["containers"]
        expect(container["command"][2].startswith("exec valkey-server "), container["command"])
        command = [*container["command"][:2], container["command"][2].replace("valkey-server", "redis-server") + f" --port {port}"]
    environment = os.environ | {"REDIS_PASSWORD": secret.get("redis-password", "")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "Ready to accept connections" in line:
            return process, port
    raise AssertionError(f"{command} does not start")


def for_this_machine(text, folder, redis):
    """Replace what only exists in the cluster: directories of the container, fixed ports, and the name of Redis."""
    text = text.replace("/etc/sluicegate-", f"{folder}/sluicegate-").replace("/tmp/admin.sock", f"{folder}/admin.sock")
    text = re.sub(r'address = "[^"]*:\d+"', 'address = "127.0.0.1:0"', text)
    return re.sub(r"(redis://)[^:/]*:6379", rf"\g<1>127.0.0.1:{redis}", text)


def mount(there, folder):
    """Create what the volumes of the Pod contain."""
    shutil.rmtree(folder, ignore_errors=True)
    others = ROOT / "tests/certs"
    certificates = iter([(CERTIFICATE, KEY), *((others / f"{name}.pem", others / f"{name}.key") for name in ("one", "two"))])
    for each in pod_of(there)["spec"]["containers"][0]["volumeMounts"]:
        path = each["mountPath"]
        inside = folder / path.removeprefix("/etc/")
        if path.startswith("/etc/sluicegate-tls/"):
            inside.mkdir(parents=True)
            # Certificates of other names: `check` warns of two that are valid for the same names.
            certificate, key = next(certificates)
            shutil.copy(certificate, inside / "tls.crt")
            shutil.copy(key, inside / "tls.key")
        elif path.startswith("/etc/sluicegate-files/"):
            inside.mkdir(parents=True)
            for name, content in MOUNTED.items():
                if name.startswith(f"{inside.name}/"):
                    (inside.parent / name).write_text(content)


def admin(gateway, method, path, token):
    request = urllib.request.Request(f"{gateway.admin}{path}", method=method, headers={"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def run_gateway(name, there, secret):
    """Check the configuration, start the gateway with it, and read its readiness."""
    folder = FOLDER / "run"
    mount(there, folder)
    redis, port = (None, 0)
    if "redis://" in configuration(there):
        redis, port = start_redis(there, secret)
    try:
        text = for_this_machine(configuration(there), folder, port)
        os.environ |= {"SLUICEGATE_ADMIN_TOKEN": secret["admin-token"]}
        for variable in pod_of(there)["spec"]["containers"][0]["env"]:
            key = variable.get("valueFrom", {}).get("secretKeyRef")
            os.environ[variable["name"]] = secret[key["key"]] if key else variable["value"]
        file = folder / "gateway.toml"
        folder.mkdir(exist_ok=True)
        file.write_text(text)
        check = subprocess.run([BINARY, "check", "--offline", "--strict", "--config", file], capture_output=True, text=True)
        expect(check.returncode == 0, f"{name}: {check.stdout}{check.stderr}\n{text}")
        with Gateway(BINARY, text) as gateway:
            expect(len(gateway.urls) == configuration(there).count("[[listener]]"), gateway.urls)
            probe = subprocess.run([BINARY, "probe", "--url", gateway.admin], capture_output=True, text=True)
            expect(probe.returncode == 0, f"{name}: {probe.stderr}")
            deadline = time.monotonic() + 20
            while True:
                status, ready = admin(gateway, "GET", "/readyz", secret["admin-token"])
                expect(status == 200, f"{name}: {status} {ready}")
                # The gateway connects to Redis in the background.
                if ready["status"] == "ready":
                    break
                expect(time.monotonic() < deadline, f"{name}: {ready}")
                time.sleep(0.01)
    finally:
        if redis:
            redis.kill()
            redis.wait()


def check_restarts():
    """A scaled deployment keeps its Pods and applies later changes; a change that needs a restart replaces the Pods."""
    before = rendered(VALUES / "defaults.yaml")
    for values, kept in [
        (["--set", "replicas=5"], True),
        (["--set", "trustedProxies={192.0.2.0/24}"], True),
        (["--set", "settings.server.max_headers=50"], True),
        (["--set", "settings.limit.other.by=ip", "--set", "settings.limit.other.quota=1/s"], True),
        (["--set", "workers=7"], False),
        (["--set", "settings.server.threading=work-stealing"], False),
        (["--set", "settings.store.timeout=70ms"], False),
        (["--set", "settings.log.level=warn"], False),
        (["--set", "settings.acme.accept_terms=true"], False),
        (["--set", "secrets.adminToken=another"], False),
        (["--set", "listeners[0].name=http", "--set", "listeners[0].port=8081"], False),
    ]:
        after = rendered(VALUES / "defaults.yaml", *values)
        if values[1] != "replicas=5":
            expect(configuration(after) != configuration(before) or not kept, values)
        expect((restart_mark(after) == restart_mark(before)) == kept, values)
    scaled = configuration(rendered(VALUES / "defaults.yaml", "--set", "replicas=5"))
    expect("gateway_count = 2\n" in configuration(before) and "gateway_count = 5\n" in scaled, scaled)
    secret = before["Secret", "edge-sluicegate"]["stringData"]
    os.environ |= {"REDIS_PASSWORD": secret["redis-password"], "SLUICEGATE_STORE_SECRET": secret["store-secret"]}
    os.environ["SLUICEGATE_ADMIN_TOKEN"] = secret["admin-token"]
    port = free_port()
    with Gateway(BINARY, for_this_machine(configuration(before), FOLDER, port)) as gateway:
        changed = for_this_machine(scaled.replace("100/s", "50/s"), FOLDER, port)
        (pathlib.Path(gateway.folder.name) / "gateway.toml").write_text(changed)
        status, reply = admin(gateway, "POST", "/api/reload", secret["admin-token"])
        expect((status, reply["result"]) == (200, "ok"), reply)


def check_rejected():
    for arguments, reason in [
        (["--set", "config=x"], "secrets.adminToken is required"),
        (["--set", "config=x,secrets.adminToken=a,secrets.storeSecret=b"], "secrets.redisPassword is required"),
        (["--set", "existingSecret=s"], "no routes: set `config` or `settings.route`"),
        (["--set", "existingSecret=s,config=x,redis.enabled=false"], "store.url is required"),
        (["--set", "existingSecret=s,config=[server]"], 'config: set the keys of "[server]" in `settings`'),
        (["--set", "existingSecret=s,settings.listener[0].name=x"], "settings.listener: set `listeners`"),
        (["--set", "existingSecret=s,settings.admin.address=x"], "settings.admin.address"),
        (["--set", "existingSecret=s,settings.server.drain_timeout=1s"], "settings.server.drain_timeout: set `drainTimeoutSeconds`"),
    ]:
        error = template(*arguments, ok=False)
        expect(reason in error, f"{arguments}: {error}")


def check_details(name, there):
    """What single value files are about."""
    pod, text = pod_of(there)["spec"], configuration(there)
    deployment = there["Deployment", "edge-sluicegate"]["spec"]
    expect(pod["terminationGracePeriodSeconds"] >= 45, pod)
    numbers = {key: int(value) for key, value in re.findall(r"^(workers|max_connections) = (\d+)$", text, re.MULTILINE)}
    if name == "defaults.yaml":
        expect(numbers == {"workers": 1}, numbers)
        check_equals_manifest(deployment)
    if name == "settings.yaml":
        expect(numbers == {"workers": 3, "max_connections": 5000}, numbers)
        expect(pod["terminationGracePeriodSeconds"] == 3622, pod)
    if name == "small.yaml":
        expect(numbers == {"workers": 0}, numbers)
        expect(pod["containers"][0]["image"] == "registry.example/sluicegate:1.2.3", pod)
    if name == "proxied.yaml":
        expect(numbers == {"workers": 2}, numbers)
        expect('address = "[::]:8000"' in text and 'address = "[::]:9180"' in text, text)
    if name == "autoscaled.yaml":
        expect("replicas" not in deployment and "gateway_count = 3\n" in text and numbers["workers"] == 2, text)
        rules = FOLDER / "rules.yml"
        rules.write_text(yaml.safe_dump(there["PrometheusRule", "edge-sluicegate"]["spec"]))
        subprocess.run([PROMTOOL, "check", "rules", rules], check=True, stdout=subprocess.DEVNULL)
    if name == "memory.yaml":
        expect(list(there["Secret", "edge-sluicegate"]["stringData"]) == ["admin-token"], there)
        expect(("PodDisruptionBudget", "edge-sluicegate") not in there, "one gateway has no disruption budget")
    if name == "edge.yaml":
        spec = there["Service", "edge-sluicegate"]["spec"]
        expect([port["port"] for port in spec["ports"]] == [80, 443, 8444], spec)
        expect(spec["externalTrafficPolicy"] == "Local" and spec["loadBalancerSourceRanges"] == ["192.0.2.0/24"], spec)


def check_equals_manifest(deployment):
    """The chart and ops/kubernetes.yaml have everything in common except names, labels and the image."""

    def kept(deployment):
        pod = deployment["template"]["spec"]
        [container] = pod["containers"]
        rest = {key: value for key, value in container.items() if key not in ("image", "imagePullPolicy", "env")}
        variables = [(each["name"], each["valueFrom"]["secretKeyRef"]["key"]) for each in container["env"]]
        return [deployment["replicas"], deployment["strategy"], rest, variables, pod["terminationGracePeriodSeconds"], pod["securityContext"]]

    manifests = yaml.safe_load_all((ROOT / "ops/kubernetes.yaml").read_text())
    [plain] = [each["spec"] for each in manifests if each["kind"] == "Deployment"]
    expect(kept(deployment) == kept(plain), "the chart and ops/kubernetes.yaml differ")


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    manual = FOLDER / "manual.yaml"
    manual.write_text((ROOT / "docs/how-to/kubernetes.md").read_text().split("```yaml\n# my-values.yaml\n")[1].split("```")[0])
    files = [*sorted(VALUES.glob("*.yaml")), manual]
    for file in files:
        there = rendered(file)
        check_schemas(there)
        secret = check_references(there, yaml.safe_load(file.read_text()))
        check_details(file.name, there)
        run_gateway(file.name, there, secret)
        print(f"chart, {file.name}: {len(there)} objects; the gateway runs")
    check_restarts()
    check_rejected()
    print(f"chart: {len(files)} value files, by helm and the schemas of Kubernetes {', '.join(VERSIONS)}")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"chart: {error}")
