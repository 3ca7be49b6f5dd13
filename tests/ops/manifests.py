"""Check that the manifests in ops/ match the Kubernetes schemas, and that the names in them agree."""

import pathlib
import sys

import kubernetes_validate
import yaml

OPS = pathlib.Path(sys.argv[1])
# An old and a current version of Kubernetes.
VERSIONS = ["1.27", "1.37"]


def kubernetes():
    documents = list(yaml.safe_load_all((OPS / "kubernetes.yaml").read_text()))
    there = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(there) == len(documents), "two of one name"
    for version in VERSIONS:
        for each in documents:
            kubernetes_validate.validate(each, version, strict=True)
    pods = [each["spec"]["template"] for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
    for pod in pods:
        for container in pod["spec"]["containers"]:
            for variable in container["env"]:
                key = variable["valueFrom"]["secretKeyRef"]
                assert key["key"] in there["Secret", key["name"]]["stringData"], key
            volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
        for volume in pod["spec"].get("volumes", []):
            assert ("ConfigMap", volume["configMap"]["name"]) in there, volume
    for each in documents:
        selector = each["spec"].get("selector") if "spec" in each else None
        if selector is None:
            continue
        labels = selector.get("matchLabels", selector)
        chosen = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
        assert len(chosen) == 1, f"{each['kind']} {each['metadata']['name']} chooses {len(chosen)} kinds of pods"
        if each["kind"] == "Service":
            named = {port["name"] for container in chosen[0]["spec"]["containers"] for port in container["ports"]}
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= named, each
    deployment = there["Deployment", "sluicegate"]
    configuration = there["ConfigMap", "sluicegate"]["data"]["gateway.toml"]
    assert f"gateway_count = {deployment['spec']['replicas']}\n" in configuration
    pod = deployment["spec"]["template"]["spec"]
    grace, drain = (int(configuration.split(f'{key} = "')[1].split("s")[0]) for key in ("accept_grace", "drain_timeout"))
    assert "lifecycle" not in pod["containers"][0], "accept_grace replaces a preStop hook"
    assert pod["terminationGracePeriodSeconds"] > grace + drain
    assert "sluicegate-redis:6379" in configuration and ("Service", "sluicegate-redis") in there
    print(f"kubernetes.yaml: {len(documents)} documents, valid for Kubernetes {', '.join(VERSIONS)}")


def compose():
    file = yaml.safe_load((OPS / "docker-compose.yml").read_text())
    services = file["services"]
    for name, service in services.items():
        assert ("image" in service) != ("build" in service), name
        for mount in service.get("volumes", []):
            assert (OPS / mount.split(":")[0]).exists(), f"{name}: {mount}"
        assert set(service.get("depends_on", {})) <= set(services), name
        assert set(service.get("secrets", [])) <= set(file["secrets"]), name
        assert {each["source"] for each in service.get("configs", [])} <= set(file["configs"]), name
    build = services["gateway"]["build"]
    assert (OPS / build["context"] / build["dockerfile"]).exists()
    configuration = OPS / pathlib.PurePath(services["gateway"]["environment"]["SLUICEGATE_CONFIG"]).name
    assert "redis://redis:" in configuration.read_text() and "http://api:" in configuration.read_text()
    for each in file["configs"].values():
        assert yaml.safe_load(each["content"])["apiVersion"] == 1
    scraped = yaml.safe_load((OPS / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["gateway:9180"]
    assert scraped["authorization"]["credentials_file"] == f"/run/secrets/{services['prometheus']['secrets'][0]}"
    print(f"docker-compose.yml: {len(services)} services")


kubernetes()
compose()
