"""Tests of check.py: what is in the tree passes, and each planted mistake is found by the check that is there for it.

    python3 deploy/test_check.py            all: some six minutes
    python3 deploy/test_check.py Planted    the mistakes alone
    python3 deploy/test_check.py --quick    without checks that take seconds each time (SLOW): ten seconds of a processor

Each mistake is planted in a copy of the tree. Tests of a program that is not installed are skipped, with its name.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECK = ROOT / "deploy/check.py"
sys.path.insert(0, str(CHECK.parent))

import check  # noqa: E402
import checks  # noqa: E402
from checks import importer, picture, tools  # noqa: E402

# Checks that take seconds each time; `--quick` leaves these out, and the whole tree, which check.py itself judges.
SLOW = ("promtool-tests", "prometheus-live", "browser", "kubernetes-schema", "supply-chain")
QUICK = "--quick" in sys.argv
# A table for trees in which docs/metrics.md does not stand: what alerts and dashboards were written against.
METRICS = os.environ.get("VERDIGRIS_CHECK_METRICS")


def run(root, *arguments):
    """Exit code and results of check.py on a tree, in this process."""
    words = ["--root", root, *(["--metrics", METRICS] if METRICS else []), *arguments]
    code, results = check.checked(check.parser().parse_args([str(word) for word in words]))
    return code, {result["check"]: result for result in results}


class Tree(unittest.TestCase):
    @unittest.skipIf(QUICK, "it takes as long as check.py")
    def test_the_tree_passes(self):
        code, results = run(ROOT)
        failed = {name: result["findings"] for name, result in results.items() if result["status"] == "failed"}
        self.assertEqual((code, failed), (0, {}))

    def test_a_program_that_is_not_there_is_told_and_fails_nothing_unless_asked(self):
        path = os.environ["PATH"]
        try:
            os.environ["PATH"] = "/nonexistent"
            code, results = run(ROOT, "--only", "promtool-rules")
            strict, _ = run(ROOT, "--only", "promtool-rules", "--strict")
        finally:
            os.environ["PATH"] = path
        self.assertEqual((code, strict, results["promtool-rules"]["status"]), (0, 1, "skipped"))
        self.assertIn("apt-get install prometheus", results["promtool-rules"]["summary"])

    def test_a_program_that_was_to_be_there_is_a_finding(self):
        path = os.environ["PATH"]
        try:
            os.environ["PATH"] = "/nonexistent"
            code, results = run(ROOT, "--only", "tools,promtool-rules", "--expect", "promtool,amtool")
        finally:
            os.environ["PATH"] = path
        self.assertEqual((code, results["tools"]["status"], results["promtool-rules"]["status"]), (1, "failed", "skipped"))
        self.assertEqual([finding.split()[0] for finding in results["tools"]["findings"]], ["promtool", "amtool"])
        shell = Path(shutil.which("sh")).name
        code, results = run(ROOT, "--only", "tools", "--expect", shell)
        self.assertEqual((code, results["tools"]["status"]), (0, "passed"), results)

    def test_a_package_of_another_version_than_the_environment_was_to_have(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "deploy").mkdir()
            (Path(folder) / "deploy/requirements.txt").write_text("# Two.\npip==0.0.1   # older\nno-such-package[extra]==1.0\n")
            tree = checks.Tree(Path(folder), Path(folder), has_environment=True)
            _, findings = tools.tools(tree)
            self.assertEqual([finding.split()[0] for finding in findings], ["pip", "no-such-package"])
            self.assertIn("not there, and deploy/requirements.txt says 1.0", findings[1])
            with self.assertRaises(checks.Skipped):
                tools.tools(checks.Tree(Path(folder), Path(folder)))

    def test_wrong_usage(self):
        for arguments, said in ((["--only", "nothing"], "no check is called nothing"), (["--verdigris", "/nonexistent"], "is no file")):
            done = subprocess.run([sys.executable, CHECK, *arguments], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 2)
            self.assertIn(said, done.stderr)


class Planted(unittest.TestCase):
    """Each test plants one mistake. `find` is the check that must find it, `said` a part of what it must say."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="verdigris-check-")
        self.addCleanup(folder.cleanup)
        self.root, self.found = Path(folder.name), False
        for name in ("deploy", "docs", "crates/verdigris/src/observe"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", "performance"))
        tests = {test.partition("::")[0] for row in tomllib.loads((ROOT / "deploy/failures.toml").read_text())["failure"] for test in row["tests"]}
        traces = {path.relative_to(ROOT) for path in (ROOT / "bench/record").glob("**/*trace*.json.gz")}
        for name in {"Cargo.toml", "LICENSE-MIT", "LICENSE-APACHE", "README.md", "crates/verdigris-telemetry/src/buckets.rs"} | tests | traces:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    def plant(self, name, old, new, count=1):
        path = self.root / name
        text = path.read_text(encoding="utf-8")
        self.assertIn(old, text, f"{name} has no longer what the mistake is planted in")
        path.write_text(text.replace(old, new, count), encoding="utf-8")

    def find(self, name, said, *arguments):
        if QUICK and name in SLOW:
            # A mistake that another check has found already is a test all the same.
            if not self.found:
                self.skipTest(f"{name} takes long")
            return
        code, results = run(self.root, "--only", name, *arguments)
        result = results[name]
        if result["status"] == "skipped":
            self.skipTest(result["summary"])
        self.assertEqual((code, result["status"]), (1, "failed"), result)
        self.assertIn(said, "\n".join(result["findings"]))
        self.found = True

    ALERTS = "deploy/prometheus/alerts.yml"
    RULES = "deploy/prometheus/rules.yml"
    BOARD = "deploy/grafana/oncall.json"
    DEPLOYMENT = "deploy/kubernetes/base/deployment.yaml"

    # Rules and alerts.

    def test_an_alert_on_a_metric_that_does_not_exist(self):
        self.plant(self.ALERTS, "(verdigris_overdue_executions)", "(verdigris_overdue_execution)")
        self.find("alerts-names", "there is no metric `verdigris_overdue_execution`")

    def test_an_alert_by_a_label_that_the_metric_does_not_have(self):
        self.plant(self.ALERTS, 'verdigris_errors_total{kind="out_of_memory"}', 'verdigris_errors_total{type="out_of_memory"}')
        self.find("alerts-names", "has no label `type`; it has device, kind")

    def test_a_value_that_the_label_never_has(self):
        self.plant(self.ALERTS, 'verdigris_errors_total{kind="out_of_memory"}', 'verdigris_errors_total{kind="oom"}')
        self.find("alerts-names", "has no kind `oom`")

    def test_a_sum_by_a_label_that_is_not_there(self):
        self.plant(self.RULES, "sum by (job, op, device) (rate(verdigris_executions_total[5m]))", "sum by (job, op, device, model) (rate(verdigris_executions_total[5m]))")
        self.find("alerts-names", "by or without `model`")

    def test_a_rate_of_a_gauge(self):
        self.plant(self.RULES, "rate(verdigris_executions_total[5m])", "rate(verdigris_gpu_power_watts[5m])")
        self.find("alerts-names", "rate() of `verdigris_gpu_power_watts`, which is a gauge")

    def test_a_histogram_without_its_buckets(self):
        self.plant(self.RULES, "rate(verdigris_device_seconds_bucket[5m])", "rate(verdigris_device_seconds[5m])")
        self.find("alerts-names", "of which only _bucket, _count and _sum are series")

    def test_sides_that_never_match(self):
        self.plant(self.ALERTS, "and on (job) job:verdigris_builds:count1d > 1", "and job:verdigris_builds:count1d > 1")
        self.find("alerts-names", "which never match")

    def test_promql_that_does_not_parse(self):
        self.plant(self.ALERTS, "max by (job, node, instance, device) (verdigris_overdue_executions) > 0", "max by (job, node (verdigris_overdue_executions) > 0")
        self.find("promtool-rules", "parse error")

    def test_an_alert_that_does_not_fire_any_more(self):
        self.plant(self.ALERTS, "verdigris_overdue_executions) > 0", "verdigris_overdue_executions) > 100")
        self.find("promtool-tests", "VerdigrisExecutionOverdue")

    def test_an_alert_without_hysteresis(self):
        self.plant(self.ALERTS, "for: 1m\n        keep_firing_for: 5m\n", "for: 1m\n")
        self.find("alerts-form", "no `keep_firing_for`")
        self.find("promtool-tests", "VerdigrisExecutionOverdue")

    def test_an_alert_that_one_scrape_fires(self):
        self.plant(self.ALERTS, "for: 1m\n        keep_firing_for: 5m\n", "keep_firing_for: 5m\n")
        self.find("alerts-form", "one bad scrape fires it")
        self.find("promtool-tests", "VerdigrisExecutionOverdue")

    def test_an_alert_without_a_test(self):
        self.plant(self.ALERTS, "      - alert: VerdigrisDrift\n", "      - alert: VerdigrisDrifting\n")
        self.find("alerts-tested", "VerdigrisDrifting fires in no test")

    def test_a_test_with_a_bucket_that_the_library_does_not_have(self):
        self.plant("deploy/prometheus/tests.yml", 'model="digits",le="0.1"', 'model="digits",le="0.13"', count=1)
        self.find("alerts-buckets", 'verdigris_serve_request_seconds has no bucket le="0.13"')

    def test_a_bound_of_the_library_that_tests_still_have(self):
        self.plant("crates/verdigris-telemetry/src/buckets.rs", "7.5e-2, 0.1, 0.15", "7.5e-2, 0.15")
        self.find("alerts-buckets", 'has no bucket le="0.1"')

    def test_an_alert_without_a_section_of_the_runbook(self):
        self.plant(self.ALERTS, "runbook.md#f7-noisy-neighbour", "runbook.md#f8-noisy-neighbour")
        self.find("alerts-form", "leads to no section")

    def test_a_text_that_names_a_label_which_was_summed_away(self):
        self.plant(self.ALERTS, 'summary: "{{ $value }} executions hang', 'summary: "{{ $labels.op }} executions hang')
        self.find("alerts-form", "speaks of the label `op`")

    def test_an_unknown_severity(self):
        self.plant(self.ALERTS, "{severity: page,", "{severity: critical,")
        self.find("alerts-form", "neither page nor ticket")

    def test_an_alertmanager_that_names_no_alert(self):
        self.plant("deploy/prometheus/alertmanager.yml", "alertname = VerdigrisSlowerThanItsWeek", "alertname = VerdigrisSlow")
        self.find("alertmanager", "VerdigrisSlow, which does not exist")

    def test_an_alertmanager_that_does_not_load(self):
        self.plant("deploy/prometheus/alertmanager.yml", "receiver: pager", "receiver: nobody")
        self.find("alertmanager", "nobody")

    def test_pages_that_go_to_the_tickets(self):
        self.plant("deploy/prometheus/alertmanager.yml", "matchers: [severity = page]", "matchers: [severity = pages]")
        self.find("alertmanager", "severity=page goes to tickets")

    def test_an_inhibition_by_a_label_that_its_source_lacks(self):
        self.plant("deploy/prometheus/alertmanager.yml", "equal: [job, op, device]", "equal: [job, op, node]")
        self.find("alertmanager", "is for equal node, which VerdigrisSlowerAfterUpgrade does not have")

    # Dashboards.

    def test_a_dashboard_edited_by_hand(self):
        self.plant(self.BOARD, '"title": "Queue"', '"title": "The queue"')
        self.find("dashboards-fresh", "oncall.json")

    def test_a_field_that_grafana_does_not_know(self):
        self.plant(self.BOARD, '"transparent": true', '"seeThrough": true')
        self.find("dashboards-schema", "seeThrough is no field")

    def test_a_field_of_the_wrong_type(self):
        self.plant(self.BOARD, '"w": 8', '"w": "8"')
        self.find("dashboards-schema", "which is no int")

    def test_panels_over_each_other(self):
        self.plant(self.BOARD, '"w": 8', '"w": 9')
        self.find("dashboards-form", "lies over")

    def test_a_query_of_a_metric_that_does_not_exist(self):
        self.plant(self.BOARD, "verdigris_serve_queue_rows", "verdigris_queue_rows")
        self.find("dashboards-queries", "there is no metric `verdigris_queue_rows`")

    def test_a_query_that_does_not_parse(self):
        self.plant(self.BOARD, "sum by (model) (verdigris_serve_queue_rows", "sum by model) (verdigris_serve_queue_rows")
        self.find("dashboards-queries", "promtool does not read")

    def test_a_legend_of_a_label_that_the_query_does_not_have(self):
        self.plant(self.BOARD, "rows {{model}}", "rows {{dtype}}")
        self.find("dashboards-queries", "the legend speaks of `dtype`")

    def test_a_variable_that_is_not_declared(self):
        self.plant(self.BOARD, 'verdigris_serve_queue_rows{model=~\\"$model\\"}', 'verdigris_serve_queue_rows{model=~\\"$network\\"}')
        self.find("dashboards-form", "the variable $network is used and not declared")

    def test_a_picture_of_another_dashboard(self):
        self.plant(self.BOARD, '"title": "Queue"', '"title": "The queue"')
        self.find("dashboard-pictures", "is of another dashboard, other rules or another story")
        self.find("dashboard-pictures", "has no panel `The queue`")

    def test_a_picture_of_another_debug_dashboard(self):
        self.plant("deploy/grafana/debug.json", '"title": "Pool growth"', '"title": "Growth of the pool"')
        self.find("dashboard-pictures", "docs/operations/debug-dashboard.svg is of another dashboard")
        self.find("dashboard-pictures", "docs/operations/debug-dashboard.svg has no panel `Growth of the pool`")

    def test_a_picture_of_the_overview_that_is_not_there(self):
        (self.root / "docs/operations/executive-dashboard.svg").unlink()
        self.find("dashboard-pictures", "executive-dashboard.svg")

    def test_a_picture_of_other_buckets(self):
        self.plant("crates/verdigris-telemetry/src/buckets.rs", "7.5e-2, 0.1, 0.15", "7.5e-2, 0.15")
        self.find("dashboard-pictures", "is of another dashboard, other rules or another story")

    def test_a_picture_of_other_rules(self):
        self.plant(self.RULES, "vector(0.5)", "vector(0.25)")
        self.find("dashboard-pictures", "is of another dashboard, other rules or another story")

    def test_a_story_of_metrics_that_do_not_exist(self):
        self.plant("docs/metrics.md", "| verdigris_serve_queue_rows |", "| verdigris_serve_rows_queued |")
        self.find("dashboard-pictures", "the story has `verdigris_serve_queue_rows`, which stands in no row of the table")

    def test_a_story_of_a_histogram_that_is_none(self):
        self.plant("docs/metrics.md", "| verdigris_plan_seconds | histogram |", "| verdigris_plan_seconds | gauge |")
        self.find("dashboard-pictures", "the story has `verdigris_plan_seconds` as a histogram; the table says gauge")

    def test_a_bucket_of_a_metric_whose_bounds_are_counted(self):
        self.plant("deploy/grafana/debug.json", "verdigris_amax_ratio_bucket{", 'verdigris_amax_ratio_bucket{le=\\"0.1\\", ')
        self.find("alerts-buckets", 'verdigris_amax_ratio has no bucket le="0.1"')

    def test_a_label_that_alerts_do_not_have(self):
        self.plant("docs/runbook.md", "alert's label `instance`", "alert's label `pod`")
        self.find("runbook", "it takes the label `pod` from an alert, which 2 of")

    # Kubernetes.

    def test_a_field_that_kubernetes_does_not_know(self):
        self.plant(self.DEPLOYMENT, "periodSeconds: 5", "periodSecond: 5")
        self.find("kubernetes-schema", "periodSecond")

    def test_a_field_of_the_wrong_type_in_a_manifest(self):
        self.plant(self.DEPLOYMENT, "replicas: 2", "replicas: two")
        self.find("kubernetes-schema", "Deployment verdigris-serve")

    def test_a_field_that_the_operator_does_not_know(self):
        self.plant("deploy/kubernetes/components/monitoring/servicemonitors.yaml", "scrapeTimeout: 10s", "scrapeTimeOut: 10s")
        self.find("kubernetes-schema", "scrapeTimeOut")

    def test_a_rule_that_the_operator_does_not_take(self):
        self.plant("deploy/kubernetes/components/monitoring/prometheusrule.yaml", "keep_firing_for: ", "keepFiringFor: ")
        self.find("kubernetes-schema", "keepFiringFor")

    def test_an_overlay_that_does_not_build(self):
        self.plant("deploy/kubernetes/overlays/cpu/serve-on-cpu.yaml", "resources/limits/nvidia.com~1gpu", "resources/limits/nvidia.com~1gpus")
        self.find("kubernetes-build", "cpu")

    def test_a_manifest_that_nothing_lists(self):
        self.plant("deploy/kubernetes/base/kustomization.yaml", "  - poddisruptionbudget.yaml\n", "")
        self.find("kubernetes-build", "poddisruptionbudget.yaml is listed in no kustomization")

    def test_a_service_that_selects_nothing(self):
        self.plant("deploy/kubernetes/base/service.yaml", "selector: {app.kubernetes.io/name: verdigris-serve}", "selector: {app.kubernetes.io/name: verdigris}")
        self.find("kubernetes-references", "selects no pod")

    def test_a_probe_of_a_port_that_no_container_has(self):
        self.plant(self.DEPLOYMENT, "{path: /healthz, port: http}", "{path: /healthz, port: web}")
        self.find("kubernetes-references", "the livenessProbe of serve asks for the port web")

    def test_a_config_map_that_is_not_there(self):
        self.plant("deploy/kubernetes/base/kustomization.yaml", "  - name: verdigris-plans\n", "  - name: verdigris-plan\n")
        self.find("kubernetes-references", "mounts the config map verdigris-plans, which is not there")

    def test_a_cache_where_nothing_is_mounted(self):
        self.plant(self.DEPLOYMENT, "value: /var/cache/verdigris/kernels", "value: /var/lib/verdigris/kernels")
        self.find("kubernetes-references", "VERDIGRIS_CACHE of doctor is /var/lib/verdigris/kernels, and nothing is mounted there")

    def test_a_container_that_may_gain_privileges(self):
        self.plant(self.DEPLOYMENT, "allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true")
        self.find("kubernetes-hardened", "lacks doctor: allowPrivilegeEscalation: false")

    def test_a_root_that_may_be_written(self):
        self.plant("deploy/kubernetes/components/exporter/daemonset.yaml", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false")
        self.find("kubernetes-hardened", "lacks exporter: readOnlyRootFilesystem")

    def test_rules_that_were_changed_for_one_prometheus_alone(self):
        self.plant(self.RULES, "vector(0.5)", "vector(0.25)")
        self.find("kubernetes-rules", "run deploy/check.py --write")

    # Units, images, texts.

    def test_a_key_that_systemd_does_not_know(self):
        self.plant("deploy/systemd/verdigris-exporter.service", "ProtectHome=yes", "ProtectHomes=yes")
        self.find("systemd", "ProtectHomes")

    def test_a_unit_that_is_open(self):
        self.plant("deploy/systemd/verdigris-exporter.service", "DynamicUser=yes", "User=root")
        self.find("systemd", "the exposure")

    def test_an_image_that_runs_as_root(self):
        self.plant("deploy/container/Containerfile", "USER 65532:65532", "USER 0:0")
        self.find("container", "USER by number, not 0")

    def test_an_instruction_that_does_not_exist(self):
        self.plant("deploy/container/Containerfile", "WORKDIR /source", "WORKFOLDER /source")
        self.find("container", "unexpected")

    def test_a_pipe_that_hides_a_failure(self):
        self.plant("deploy/container/Containerfile", "-o /tmp/rustup.sh https://sh.rustup.rs \\\n        && sh /tmp/rustup.sh", "https://sh.rustup.rs \\\n        | sh -s --")
        self.find("container", "DL4006")

    def test_an_image_with_the_toolkit(self):
        self.plant("deploy/container/Containerfile", "FROM debian:${DEBIAN}\n", "FROM nvidia/cuda:13.0.0-runtime-ubuntu24.04\n")
        self.find("container", "no image or package of NVIDIA's")

    def copy_sources(self, *names):
        for name in names:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    def test_an_image_that_compiles_the_engines_twice(self):
        self.plant("deploy/container/Containerfile", '--release --bin xtask --features "${FEATURES}" --', "--release -p xtask --")
        self.find("container", "picked by name and not by package")

    IGNORE = "deploy/container/Containerfile.dockerignore"

    def test_an_image_that_lacks_a_file_which_a_source_includes(self):
        self.copy_sources("crates/verdigris-cli/src/matrix.rs", "docs/performance/tested.json")
        self.plant(self.IGNORE, "!docs/performance/tested.json\n", "")
        self.find("container", f"`docs/performance` of {self.IGNORE} keeps docs/performance/tested.json out of the build")

    def test_an_image_that_lacks_a_folder_of_which_a_macro_includes_files(self):
        self.copy_sources("crates/verdigris-workshop/src/fuzz/formats.rs")
        self.plant(self.IGNORE, "\n.git\n", "\n.git\n**/corpora\n")
        self.find("container", "keeps crates/verdigris-workshop/corpora out of the build")

    def test_an_image_that_lacks_what_a_build_script_reads(self):
        self.copy_sources("crates/verdigris-python/build.rs", "Cargo.lock")
        self.plant(self.IGNORE, "\n.git\n", "\n.git\n*.lock\n")
        self.find("container", "keeps Cargo.lock out of the build, and crates/verdigris-python/build.rs reads it")

    def test_an_image_that_lacks_sources(self):
        self.copy_sources("crates/verdigris-cli/src/matrix.rs")
        self.plant(self.IGNORE, "\n.git\n", "\n.git\ncrates/*/src/m[a-c]?rix.rs\n")
        self.find("container", "keeps crates/verdigris-cli/src/matrix.rs out of the build, which cargo compiles")

    CONTAINER = "deploy/container/Containerfile"

    def test_a_tuned_set_whose_hash_nobody_checks(self):
        self.plant(self.CONTAINER, "     && sha256sum --check --strict /tmp/plans.sha256 \\\n", "")
        self.find("container", "with a set and another hash, the step that copies the tuned set ends with 0")

    def test_a_tuned_set_that_others_may_write(self):
        self.plant(self.CONTAINER, 'install -D -m 0644 "${PLANS}"', 'install -D -m 0664 "${PLANS}"')
        self.find("container", "/usr/share/verdigris/plans.txt has the mode 664")

    def test_a_tuned_set_that_the_image_does_not_read(self):
        self.plant(self.CONTAINER, "${PLANS:+/usr/share/verdigris/plans.txt}", "${PLANS:+/usr/share/verdigris/plan.txt}")
        self.find("container", "with a set and its hash, VERDIGRIS_PLANS of the image is /usr/share/verdigris/plan.txt")

    def test_an_argument_that_the_last_stage_does_not_have(self):
        self.plant(self.CONTAINER, "FROM debian:${DEBIAN}\nARG PLANS=\n", "FROM debian:${DEBIAN}\n")
        self.find("container", "VERDIGRIS_PLANS of the image is /var/cache/verdigris/plans.txt")

    def test_an_image_without_a_set_that_reads_none(self):
        self.plant(self.CONTAINER, "ENV VERDIGRIS_PLANS=${VERDIGRIS_PLANS:-/var/cache/verdigris/plans.txt}\n", "")
        self.find("container", "without either, VERDIGRIS_PLANS of the image is ,")

    def test_an_image_that_does_not_say_which_set_it_has(self):
        self.plant(self.CONTAINER, 'plans.sha256="${PLANS_SHA256}"', 'plans.sha256="unknown"')
        self.find("container", "no label of the image has the set's hash")

    def test_a_size_of_the_image_that_is_of_another_program(self):
        self.find("image-size", "the program without its symbols is ", "--verdigris", shutil.which("cat"))

    def test_a_size_of_the_image_that_does_not_add_up(self):
        self.plant("deploy/README.md", "**103.4 without", "**95.8 without")
        self.find("image-size", "are together 103.4, and the table says 95.8")

    def test_a_command_that_does_not_exist(self):
        self.plant("docs/runbook.md", "verdigris canary", "verdigris canaries")
        self.find("commands", "`verdigris canaries` does not exist")

    def test_an_argument_of_a_container_that_does_not_exist(self):
        self.plant(self.DEPLOYMENT, "args: [doctor, --json,", "args: [doctors, --json,")
        self.find("commands", "`verdigris doctors` does not exist")

    def test_options_are_looked_up_in_the_program(self):
        program = self.root / "verdigris"
        program.write_text('#!/bin/sh\nprintf "Commands:\\n  doctor  x\\n  serve  x\\n  serve-metrics  x\\n  matrix  x\\n  canary  x\\n  gate  x\\n  tune  x\\n  inspect  x\\n  run  x\\n"\n[ "$1" = doctor ] || printf -- "--device --listen --demo --help --deterministic"\n')
        program.chmod(0o755)
        self.find("commands", "`verdigris doctor` has no option --json", "--verdigris", program)

    def test_a_failure_without_a_part_of_its_section(self):
        self.plant("docs/runbook.md", "**Mend.**", "**Cure.**")
        self.find("runbook", "the part **Mend.** is missing")

    def test_a_query_of_the_runbook_that_names_nothing(self):
        self.plant("docs/runbook.md", "verdigris_pool_reserved_bytes / 1e9", "verdigris_pool_reserved / 1e9")
        self.find("runbook", "there is no metric `verdigris_pool_reserved`")

    def test_an_alert_that_the_runbook_does_not_know(self):
        self.plant("docs/runbook.md", "VerdigrisNoisyNeighbour", "the noisy neighbour's")
        self.find("runbook", "VerdigrisNoisyNeighbour is not named in the runbook")

    def test_a_link_to_nothing(self):
        self.plant("docs/runbook.md", "](../deploy/README.md)", "](../deploy/READYOU.md)")
        self.find("links", "READYOU.md leads to nothing")

    # From a failure to the command that finds it.

    FAILURES = "deploy/failures.toml"

    def test_a_failure_whose_test_is_gone(self):
        self.plant("crates/verdigris/tests/observe.rs", "fn a_hang_is_seen_and_nothing_waits_for_it()", "fn a_hang_is_seen()")
        self.find("failures", "F4 hang: there is no test crates/verdigris/tests/observe.rs::a_hang_is_seen_and_nothing_waits_for_it")

    def test_a_failure_whose_test_is_none_any_more(self):
        self.plant("crates/verdigris/tests/guards.rs", "#[test]\nfn runs_that_differ", "fn runs_that_differ")
        self.find("failures", "F5 results that differ between runs: there is no test")

    def test_a_metric_that_no_test_of_its_failure_looks_at(self):
        self.plant(self.FAILURES, 'metrics = ["verdigris_overdue_executions",', 'metrics = ["verdigris_pool_grown_total",')
        self.find("failures", "none of its tests looks at `verdigris_pool_grown_total`")

    def test_an_alert_that_looks_at_other_metrics(self):
        self.plant(self.FAILURES, 'alerts = ["VerdigrisExecutionOverdue",', 'alerts = ["VerdigrisDrift",')
        self.find("failures", "VerdigrisDrift looks at none of the metrics that move")

    def test_an_error_that_is_no_kind(self):
        self.plant(self.FAILURES, 'error = ["driver_old"', 'error = ["driver_ancient"')
        self.find("failures", "`driver_ancient` is no kind")

    def test_an_event_that_the_library_does_not_tell(self):
        self.plant(self.FAILURES, 'event = "overdue"', 'event = "late"')
        self.find("failures", "F4 hang: `late` is no event of the library")

    def test_an_event_that_no_test_of_its_failure_hears(self):
        self.plant(self.FAILURES, 'event = "overdue"', 'event = "nonfinite"')
        self.find("failures", "F4 hang: none of its tests hears the event `nonfinite`")

    def test_a_failure_without_an_error_of_which_the_runbook_does_not_say_so(self):
        self.plant("docs/runbook.md", "No call fails: a slow kernel", "A slow kernel")
        self.find("failures", "F3 slow kernel: it has no error, and the runbook's section does not say that no call fails")

    def test_an_event_that_its_section_of_the_runbook_does_not_name(self):
        self.plant("docs/runbook.md", "The event `drift`", "An event")
        self.find("failures", "F5 results that differ between runs: the runbook's section does not name the event `drift`")

    def test_a_command_that_its_section_of_the_runbook_does_not_have(self):
        self.plant("docs/runbook.md", "dmesg | grep -i xid", "dmesg")
        self.find("failures", "the runbook's section does not have `dmesg | grep -i xid`")

    def test_a_measure_that_stands_nowhere(self):
        self.plant("docs/telemetry.md", "| M7 batch", "| M70 batch")
        self.find("measures", "has no row for M7")

    def test_a_measure_of_a_metric_that_does_not_exist(self):
        self.plant("docs/telemetry.md", "| `verdigris_serve_rows_total`", "| `verdigris_serve_lines_total`")
        self.find("measures", "M7: there is no metric `verdigris_serve_lines_total`")

    # Traces.

    def change_trace(self, change):
        path = next(self.root.glob("bench/record/**/*trace*.json.gz"))
        events = json.loads(gzip.decompress(path.read_bytes()))
        change(events)
        path.write_bytes(gzip.compress(json.dumps(events).encode()))

    def test_traces_that_an_importer_would_complain_of(self):
        first = lambda events, phase: next(event for event in events if event["ph"] == phase)  # noqa: E731
        mistakes = {
            "crosses event": lambda events: first(events, "X").update(dur=first(events, "X")["dur"] + 30),
            "dur is a number": lambda events: first(events, "X").update(dur=-1),
            "ts is a number": lambda events: first(events, "X").update(ts="soon"),
            "it ends what never began": lambda events: events.append({**first(events, "E"), "ts": 1e12}),
            "it comes before the one": lambda events: [event for event in events if event["ph"] == "E"][-1].update(ts=1.0),
            "the scope of an instant": lambda events: first(events, "i").update(s="x"),
            "whole numbers of 32 bits": lambda events: first(events, "X").update(tid="one"),
            "metadata that nobody reads": lambda events: first(events, "M").update(name="process_nam"),
            "it has no name": lambda events: first(events, "X").update(name=""),
        }
        for said, change in mistakes.items():
            with self.subTest(said):
                saved = {path: path.read_bytes() for path in self.root.glob("bench/record/**/*trace*.json.gz")}
                self.change_trace(change)
                self.find("traces", said)
                for path, content in saved.items():
                    path.write_bytes(content)

    def test_traces_that_perfettos_schema_does_not_take(self):
        def change(key, value):
            return lambda events: events[-1].update({key: value})

        for number, (key, value, said) in enumerate((
            ("pid", 1 << 31, "pid is no process_id of Perfetto's schema"), ("colour", "red", "Perfetto's schema has no `colour` of an event"),
            ("cat", 7, "cat is no category_group_name"), ("args", {"count": 1 << 63}, "the argument count is no int_value"),
        )):
            with self.subTest(number):
                saved = {path: path.read_bytes() for path in self.root.glob("bench/record/**/*trace*.json.gz")}
                self.change_trace(change(key, value))
                self.find("traces-schema", said)
                for path, content in saved.items():
                    path.write_bytes(content)

    def test_what_the_importer_makes_of_a_trace_is_compared(self):
        events = [{"ph": "X", "pid": 1, "tid": 1, "ts": 1, "dur": 10, "name": "one"}, {"ph": "i", "pid": 1, "tid": 1, "ts": 3.5, "name": "two", "s": "t"}]
        wanted = importer.expected(events)
        self.assertEqual(wanted, (2, 10_000))
        self.assertEqual(importer.findings_of_import(("", 2, 10_001), wanted), [])
        for found, said in ((("slice_negative_duration 1", 2, 10_000), "counts slice_negative"), (("", 1, 10_000), "1 spans"), (("", 2, 9_000), "9000 ns")):
            (finding,) = importer.findings_of_import(found, wanted)
            self.assertIn(said, finding)

    def test_a_trace_that_was_cut_off(self):
        path = next(self.root.glob("bench/record/**/*trace*.json.gz"))
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-100]))
        self.find("traces", path.name)

    def test_no_trace_at_all(self):
        for path in self.root.glob("bench/record/**/*trace*.json.gz"):
            path.unlink()
        self.find("traces", "no trace is recorded")
        self.find("trace-picture", "no trace is recorded")

    def test_a_picture_of_another_trace(self):
        self.plant("docs/operations/step-trace.svg", "batch_norm: ", "batch_norm: about ")
        self.find("trace-picture", "is not what")

    # The table of what was tested.

    def plant_records(self):
        for name in ("__init__", "record", "tested"):
            self.copy_sources(f"crates/verdigris-python/python/verdigris/bench/{name}.py")
        self.copy_sources("docs/performance/tested.json")
        for pattern in ("bench/record/h*/*python*.jsonl*", "bench/record/h*/*canary*.jsonl", "bench/record/h*/*conformance*.jsonl", "cases/canary/*.jsonl"):
            for path in ROOT.glob(pattern):
                self.copy_sources(path.relative_to(ROOT))

    def test_a_record_that_the_table_of_what_was_tested_lacks(self):
        self.plant_records()
        texts = [path.read_text(encoding="utf-8") for path in sorted((self.root / "bench/record/h100").glob("*python.jsonl"))]
        text = next(text for text in texts if '"row"' in text)
        (self.root / "bench/record/another-chip").mkdir()
        (self.root / "bench/record/another-chip/2026-01-01-python.jsonl.gz").write_bytes(gzip.compress(text.encode().replace(b"NVIDIA H100", b"NVIDIA B200")))
        self.find("tested-fresh", "docs/performance/tested.json is not what the records under bench/record, and")

    def test_a_canary_that_the_table_of_what_was_tested_lacks(self):
        self.plant_records()
        text = next((self.root / "bench/record/h100").glob("*27-canary.jsonl")).read_text(encoding="utf-8")
        (self.root / "cases/canary/record-another.jsonl").write_text(text.replace("NVIDIA H100 80GB HBM3", "NVIDIA B200"), encoding="utf-8")
        self.find("tested-fresh", "and those of canaries that ship, give")

    def test_a_table_of_what_was_tested_that_was_edited(self):
        self.plant_records()
        self.plant("docs/performance/tested.json", '"wrong": ', '"wrong": 1')
        self.find("tested-fresh", "run deploy/check.py --write")

    # README's commands.

    def test_a_page_that_ends_before_anybody_opens_it(self):
        self.plant("README.md", "demo digits --hold", "demo digits")
        self.find("browser", "the command lacks --hold")

    def test_a_command_that_readme_has_no_more(self):
        self.plant("README.md", "-- serve --demo", "-- run --demo")
        self.find("browser", "README.md has no command `cargo run --release --bin verdigris -- serve")

    def test_a_program_that_ends_before_it_serves(self):
        program = self.root / "program"
        program.write_text("#!/bin/sh\necho no such option\nexit 2\n")
        program.chmod(0o755)
        self.find("browser", "it ended with 2 and said: no such option", "--verdigris", str(program))

    def test_a_licence_that_nobody_allowed(self):
        for name in ("crates", "xtask"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", "target", "python", "*.npy"), dirs_exist_ok=True)
        for name in ("Cargo.lock", "deny.toml"):
            shutil.copy(ROOT / name, self.root / name)
        self.plant("deny.toml", '    "ISC",', '    # "ISC",')
        self.find("supply-chain", "deny.toml does not allow `ISC`")

    def test_a_crate_that_is_banned(self):
        for name in ("crates", "xtask"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", "target", "python", "*.npy"), dirs_exist_ok=True)
        for name in ("Cargo.lock", "deny.toml"):
            shutil.copy(ROOT / name, self.root / name)
        self.plant("deny.toml", 'crate = "openssl-sys"', 'crate = "libloading"')
        self.find("supply-chain", "no C library of the system")

    # Advisories.

    def database_of(self, date, *names):
        """A database with an advisory on all versions of each crate, as a git repository whose commit is of that day."""
        folder = self.root / "database"
        for number, name in enumerate(names, 1):
            path = folder / f"crates/{name}/RUSTSEC-2099-{number:04}.md"
            path.parent.mkdir(parents=True)
            path.write_text(
                f'```toml\n[advisory]\nid = "RUSTSEC-2099-{number:04}"\npackage = "{name}"\ndate = "2099-01-01"\n\n[versions]\npatched = []\n```\n\n'
                f"# A planted advisory on {name}\n\nNothing is wrong with it.\n"
            )
        name = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        for command in (["init", "--quiet"], ["add", "."], [*name, "commit", "--quiet", "--message", "planted"]):
            day = f"{date}T00:00:00Z"
            subprocess.run(["git", "-C", folder, *command], check=True, env={**os.environ, "GIT_AUTHOR_DATE": day, "GIT_COMMITTER_DATE": day})
        return folder

    def test_a_crate_with_an_advisory(self):
        self.copy_sources("Cargo.lock", "deny.toml")
        folder = self.database_of("2099-01-02", "libloading")
        self.find("advisories", "RUSTSEC-2099-0001, A planted advisory on libloading (patched: in no version)", "--advisories", folder)

    def test_an_advisory_that_deny_toml_leaves_out_is_found_no_more(self):
        self.copy_sources("Cargo.lock", "deny.toml")
        folder = self.database_of("2099-01-02", "libloading", "serde")
        self.plant("deny.toml", "\nignore = []", '\nignore = ["RUSTSEC-2099-0001"]')
        self.find("advisories", "A planted advisory on serde", "--advisories", folder)
        _, results = run(self.root, "--only", "advisories", "--advisories", folder)
        self.assertNotIn("advisory on libloading", "\n".join(results["advisories"]["findings"]))

    def test_a_database_that_is_older_than_the_pinned_one(self):
        self.copy_sources("Cargo.lock", "deny.toml")
        self.find("advisories", "the database", "--advisories", self.database_of("2020-01-01", "libloading"))

    def test_a_database_that_cannot_be_fetched_is_told_and_fails_nothing(self):
        self.copy_sources("Cargo.lock", "deny.toml")
        self.plant("deploy/advisory-db.toml", 'url = "https://github.com/RustSec/advisory-db"', f'url = "{(self.root / "nothing").as_uri()}"')
        code, results = run(self.root, "--only", "advisories")
        self.assertEqual((code, results["advisories"]["status"]), (0, "skipped"), results)
        self.assertIn("cannot be fetched", results["advisories"]["summary"])

    # The exporter.

    def test_an_exporter_that_shows_what_the_table_does_not_say(self):
        import http.server
        import threading

        text = (
            b"# TYPE verdigris_errors_total gauge\nverdigris_errors_total{kind=\"cpu\",device=\"cpu\",shape=\"8x8\"} 1\n"
            b"# TYPE verdigris_unheard_of gauge\nverdigris_unheard_of 1\n"
        )

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/metrics"
        for said in ("exported as gauge, and is a counter", "with the labels device, kind, shape", "`verdigris_unheard_of` is exported and stands in no row"):
            with self.subTest(said):
                self.find("prometheus-live", said, "--scrape", address)

    FAKE = """#!/usr/bin/env python3
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(b"# TYPE verdigris_build_info gauge\\nverdigris_build_info{source=\\"x\\",version=\\"0.0.0\\",day=\\"monday\\"} 1\\n")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.say(json.dumps({"outputs": [{"data": [2.0] * 10}]}).encode())

    def say(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
address = f"http://127.0.0.1:{server.server_address[1]}"
lines = f"listening on {address}; not ready yet\\nready" if sys.argv[1] == "serve" else f"metrics on {address}/metrics"
print(lines, flush=True)
server.serve_forever()
"""

    def test_a_program_whose_pages_say_what_the_table_does_not(self):
        program = self.root / "program"
        program.write_text(self.FAKE)
        program.chmod(0o755)
        self.find("prometheus-live", "verdigris-exporter: `verdigris_build_info` is exported with the labels day, source, version", "--verdigris", program)

    def test_a_program_that_answers_wrongly(self):
        program = self.root / "program"
        program.write_text(self.FAKE.replace(',day=\\"monday\\"', ""))
        program.chmod(0o755)
        self.find("prometheus-live", "which are no probabilities of ten digits", "--verdigris", program)

    def test_a_program_that_prometheus_cannot_scrape(self):
        program = self.root / "program"
        program.write_text(self.FAKE.replace("{address}/metrics", "http://127.0.0.1:9/metrics"))
        program.chmod(0o755)
        self.find("prometheus-live", "the target verdigris-exporter cannot be scraped", "--verdigris", program)

    def test_a_program_that_ends_before_prometheus_comes(self):
        program = self.root / "program"
        program.write_text("#!/bin/sh\necho no such option\nexit 2\n")
        program.chmod(0o755)
        self.find("prometheus-live", "it ended with 2 and said: no such option", "--verdigris", program)

    def test_an_exporter_that_does_not_answer(self):
        self.find("prometheus-live", "Connection refused", "--scrape", "http://127.0.0.1:9/metrics")


class Pictures(unittest.TestCase):
    """What the pictures of the dashboards are drawn by."""

    def test_an_alert_fires_after_its_wait_and_is_kept(self):
        # Three minutes of truth, with a gap behind which it has to wait again, were it not kept.
        begin = picture.END - picture.SHOWN
        true = [*range(begin, begin + 181, picture.FINE), *range(begin + 240, begin + 271, picture.FINE)]

        class Answers:
            def ask(self, _, **__):
                return {"result": [{"metric": {"node": "a"}, "values": [[at, "1"] for at in true]}]}

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "deploy/prometheus").mkdir(parents=True)
            rule = {"alert": "Late", "expr": "x", "for": "1m", "keep_firing_for": "2m", "labels": {"severity": "page"}}
            (Path(folder) / "deploy/prometheus/alerts.yml").write_text(json.dumps({"groups": [{"name": "g", "rules": [rule]}]}))
            try:
                samples = list(picture.firing(checks.Tree(Path(folder), Path(folder)), Answers()))
            except checks.Skipped as reason:
                self.skipTest(str(reason))
        self.assertEqual({series for series, _, _ in samples}, {'ALERTS{alertname="Late",alertstate="firing",node="a",severity="page"}'})
        self.assertEqual([at - begin for _, at, _ in samples], list(range(60, 270 + 120, picture.FINE)))

    def test_values_as_a_person_writes_them(self):
        told = [picture.amount(value, unit) for value, unit in (
            (0.981, "percentunit"), (1.98e9, "hertz"), (4e-6, "s"), (0.25, "s"), (30, "s"), (55.4, "celsius"), (1600, "ops"), (0, "bytes"), (12, "short"), (999.6, "short"))]
        self.assertEqual(told, ["98.1 %", "1.98 GHz", "4 µs", "250 ms", "30 s", "55.4 °C", "1.6 k/s", "0 B", "12", "1000"])

    def test_lines_upon_each_other_and_buckets_within_each_other(self):
        self.assertEqual(picture.stacked([("a", [(0, 1), (1, 2)]), ("b", [(1, 5)])]), [("a", [(0, 1.0), (1, 2.0)]), ("b", [(1, 7.0)])])
        drawing, panel = picture.Drawing(), {"fieldConfig": {"defaults": {"unit": "short"}}}
        at = picture.END - picture.SHOWN
        # Buckets hold what is below them as well: all of it lies between 1 and 2, and nothing beyond.
        drawing.heatmap(panel, (0, 0, 400, 200), [("+Inf", [(at, 8.0)]), ("1", [(at, 0.0)]), ("2", [(at, 8.0)])])
        cells = [part for part in drawing.parts if part.startswith("<path")]
        self.assertEqual((len(cells), cells[0].count("z")), (1, 1))
        self.assertIn(picture.SHADES[-1], cells[0])
        self.assertTrue(any(">≤ 2</text>" in part for part in drawing.parts), drawing.parts)


if __name__ == "__main__":
    # The environment that check.py judges with.
    if check.MARK not in os.environ:
        check.enter_environment(ROOT / "target/deploy-venv")
    unittest.main(argv=[word for word in sys.argv if word != "--quick"])
