#!/usr/bin/env python3
"""Writes the three dashboards of Grafana beside this file: `python3 deploy/grafana/dashboards.py`.

They are a program and not files edited by hand, since a panel is one line here and sixty there, and since the same
panel must look the same on all three. The JSON that comes out is stable: same program, same bytes. deploy/check.py
fails where the files are not what this program writes.

    executive   is it up, how much does it do, how fast, what does it cost: for those who plan capacity
    oncall      what fires, then F1 to F7 of docs/runbook.md in order: for whoever was woken
    debug       by engine, dtype, instance and origin of kernels: for those who look for a cause
"""

import argparse
import json
import sys
from pathlib import Path

# Grafana 10.0's; later ones migrate it when they load it.
SCHEMA_VERSION = 38
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Grafana's grid has 24 columns.
COLUMNS = 24

RUNBOOK = "https://github.com/verdigris-gpu/verdigris/blob/main/docs/runbook.md"
# What every expression that is not by fleet is narrowed by. The recorded quantiles have job, op and device.
AT = 'job=~"$job", device=~"$device"'
ATN = 'job=~"$job", node=~"$node", device=~"$device"'
OP = AT + ', op=~"$op"'
OPN = ATN + ', op=~"$op"'


class Board:
    """A dashboard that grows row by row; panels of a row stand side by side until the columns are used up."""

    def __init__(self, uid, title, description, variables, refresh, span):
        self.panels = []
        self.x = self.y = self.height = 0
        self.document = {
            "uid": uid,
            "title": title,
            "description": description,
            "tags": ["verdigris"],
            "timezone": "browser",
            "editable": True,
            "graphTooltip": 1,
            "refresh": refresh,
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "time": {"from": f"now-{span}", "to": "now"},
            "timepicker": {"refresh_intervals": ["10s", "30s", "1m", "5m", "15m"]},
            "links": [
                link("Verdigris dashboards", type="dashboards", asDropdown=True, tags=["verdigris"], includeVars=True, keepTime=True),
                link("Runbook", type="link", url=RUNBOOK, icon="doc", targetBlank=True),
            ],
            "templating": {"list": [datasource_variable()] + variables},
            "annotations": {"list": [pages(), builds()]},
            "panels": self.panels,
        }

    def row(self, title):
        self._wrap()
        self._place({"type": "row", "title": title, "collapsed": False, "panels": []}, COLUMNS, 1)
        self._wrap()

    def stat(self, title, description, expr, unit="short", width=4, steps=None, reduce="lastNotNull", decimals=None):
        """One number with the colour of its thresholds."""
        panel = self._panel("stat", title, description, [expr], unit, steps, decimals)
        panel["targets"][0]["instant"] = True
        panel["targets"][0]["range"] = False
        panel["options"] = {
            "reduceOptions": {"calcs": [reduce], "fields": "", "values": False},
            "orientation": "auto",
            "textMode": "auto",
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
        }
        self._place(panel, width, 4)

    def graph(self, title, description, *queries, unit="short", width=12, height=8, steps=None, stack=False, log=False, top=None):
        """Lines over time. A query is an expression and the legend of its series."""
        panel = self._panel("timeseries", title, description, queries, unit, steps)
        custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 25 if stack else 5, "showPoints": "never", "spanNulls": False}
        custom["stacking"] = {"mode": "normal" if stack else "none", "group": "A"}
        custom["scaleDistribution"] = {"type": "log", "log": 10} if log else {"type": "linear"}
        custom["thresholdsStyle"] = {"mode": "line" if steps else "off"}
        panel["fieldConfig"]["defaults"]["custom"] = custom
        panel["fieldConfig"]["defaults"]["min"] = 0
        if log:
            del panel["fieldConfig"]["defaults"]["min"]
        if top is not None:
            panel["fieldConfig"]["defaults"]["max"] = top
        panel["options"] = {
            "legend": {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        self._place(panel, width, height)

    def heatmap(self, title, description, expr, unit="s", width=12, height=8):
        """A histogram over time, from its buckets."""
        panel = self._panel("heatmap", title, description, [(expr, "{{le}}")], unit)
        panel["targets"][0]["format"] = "heatmap"
        del panel["fieldConfig"]["defaults"]["thresholds"]
        panel["options"] = {
            "calculate": False,
            "yAxis": {"unit": unit, "axisPlacement": "left"},
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "reverse": False, "fill": "dark-orange"},
            "cellGap": 1,
            "filterValues": {"le": 1e-9},
            "tooltip": {"show": True, "yHistogram": False},
            "legend": {"show": True},
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
        }
        self._place(panel, width, height)

    def table(self, title, description, expr, unit="short", width=12, height=8, steps=None, hide=()):
        """The newest values, a row each, the largest first."""
        panel = self._panel("table", title, description, [(expr, "")], unit, steps)
        panel["targets"][0].update({"instant": True, "range": False, "format": "table"})
        panel["options"] = {"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": "Value", "desc": True}]}
        hidden = {name: True for name in ("Time", "__name__", *hide)}
        panel["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden, "indexByName": {}, "renameByName": {}}}]
        self._place(panel, width, height)

    def text(self, markdown, width=24, height=3):
        self._place({"type": "text", "title": "", "transparent": True, "options": {"mode": "markdown", "content": markdown}}, width, height)

    def _panel(self, kind, title, description, queries, unit, steps=None, decimals=None):
        targets = []
        for number, query in enumerate(queries):
            expr, legend = query if isinstance(query, tuple) else (query, "")
            targets.append({"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": expr, "range": True, "legendFormat": legend or "__auto"})
        defaults = {"unit": unit, "thresholds": {"mode": "absolute", "steps": thresholds(steps)}}
        if decimals is not None:
            defaults["decimals"] = decimals
        return {
            "type": kind,
            "title": title,
            "description": description,
            "datasource": DATASOURCE,
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []},
        }

    def _place(self, panel, width, height):
        if self.x + width > COLUMNS:
            self._wrap()
        panel["id"] = len(self.panels) + 1
        panel["gridPos"] = {"x": self.x, "y": self.y, "w": width, "h": height}
        self.x += width
        self.height = max(self.height, height)
        self.panels.append(panel)

    def _wrap(self):
        self.x, self.y, self.height = 0, self.y + self.height, 0


def thresholds(steps):
    """Steps as `[(None, "green"), (0.9, "red")]`: from which value on which colour."""
    return [{"color": color, "value": value} for value, color in steps or [(None, "green")]]


def above(limit, worse=None):
    """Green, then orange from `limit` on, and red from `worse` on; red at once where no `worse` is given."""
    return [(None, "green"), (limit, "red")] if worse is None else [(None, "green"), (limit, "orange"), (worse, "red")]


def below(good):
    return [(None, "red"), (good, "green")]


def link(title, type, url="", icon="external link", tags=(), asDropdown=False, includeVars=False, keepTime=False, targetBlank=False):
    return {
        "title": title, "type": type, "url": url, "icon": icon, "tooltip": "", "tags": list(tags),
        "asDropdown": asDropdown, "includeVars": includeVars, "keepTime": keepTime, "targetBlank": targetBlank,
    }


def pages():
    """Pages as marks in all graphs: what else moved when it fired."""
    return {
        "name": "Pages", "enable": True, "hide": False, "iconColor": "red", "datasource": DATASOURCE,
        "expr": 'ALERTS{alertname=~"Verdigris.+", alertstate="firing", severity="page"}',
    }


def builds():
    """Where a build of the library was first seen."""
    return {
        "name": "Builds", "enable": True, "hide": False, "iconColor": "blue", "datasource": DATASOURCE,
        "expr": "count by (job, version, source) (verdigris_build_info) unless count by (job, version, source) (verdigris_build_info offset 10m)",
    }


def datasource_variable():
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0, "refresh": 1, "regex": "", "multi": False, "includeAll": False}


def label_variable(name, label, query):
    """A variable with all values of a label; all of them at first."""
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE, "query": {"query": query, "refId": name},
        "hide": 0, "refresh": 2, "sort": 1, "regex": "", "multi": True, "includeAll": True, "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


JOB = label_variable("job", "Job", "label_values(verdigris_build_info, job)")
NODE = label_variable("node", "Node", 'label_values(verdigris_build_info{job=~"$job"}, node)')
DEVICE = label_variable("device", "Device", 'label_values({__name__=~"verdigris_executions_total|verdigris_gpu_up"}, device)')
OP_VARIABLE = label_variable("op", "Op", 'label_values(verdigris_executions_total{job=~"$job"}, op)')
MODEL = label_variable("model", "Model", "label_values(verdigris_serve_requests_total, model)")


def executive():
    b = Board("verdigris-executive", "Verdigris: overview", "Is it up, how much does it do, how fast is it, and are the GPUs used.", [JOB, DEVICE, OP_VARIABLE, MODEL], "1m", "24h")
    gpu = 'device=~"$device"'
    b.row("Now")
    b.stat("GPUs that answer", "Devices for which NVML answers, of those that are known.", f"sum(verdigris_gpu_up{{{gpu}}}) / count(verdigris_gpu_up{{{gpu}}})", "percentunit", steps=[(None, "red"), (1, "green")])
    b.stat("Pages firing", "Alerts that woke somebody.", 'count(ALERTS{alertname=~"Verdigris.+", alertstate="firing", severity="page"}) or vector(0)', steps=above(1))
    b.stat("Tickets firing", "Alerts for working hours.", 'count(ALERTS{alertname=~"Verdigris.+", alertstate="firing", severity="ticket"}) or vector(0)', steps=[(None, "green"), (1, "orange")])
    b.stat("Utilization (M2)", "Mean over the devices, last five minutes.", f"avg(avg_over_time(verdigris_gpu_utilization_ratio{{{gpu}}}[5m]))", "percentunit")
    b.stat("Requests answered", "Share of all requests of the last hour that ended well; requests that were malformed are the client's affair and left out.", 'sum(rate(verdigris_serve_requests_total{model=~"$model", outcome="ok"}[1h])) / sum(rate(verdigris_serve_requests_total{model=~"$model", outcome!~"bad_request|too_large|cancelled"}[1h]))', "percentunit", steps=[(None, "red"), (0.99, "orange"), (0.999, "green")], decimals=2)
    b.stat("Power", "Of all devices together.", f"sum(verdigris_gpu_power_watts{{{gpu}}})", "watt")
    b.row("What users see")
    b.graph("Request latency (M6)", "From the last byte of a request to the first of its answer, all replicas.",
            ('max(model:verdigris_serve_request_seconds:p99_5m{model=~"$model"})', "p99"), ('max(model:verdigris_serve_request_seconds:p95_5m{model=~"$model"})', "p95"),
            ('max(model:verdigris_serve_request_seconds:p50_5m{model=~"$model"})', "p50"), ("verdigris:serve_p99_objective:seconds", "objective of p99"), unit="s")
    b.graph("Rows answered (M7)", "Throughput in rows a second, by model.", ('sum by (model) (model:verdigris_serve_rows:rate5m{model=~"$model"})', "{{model}}"), unit="short", stack=True)
    b.graph("Requests by outcome", "A second; `ok` among the rest.", ('sum by (outcome) (model_outcome:verdigris_serve_requests:rate5m{model=~"$model"})', "{{outcome}}"), unit="reqps", stack=True)
    b.graph("Errors given to callers", "Share of executions, by device.", (f"max by (job, device) (device:verdigris_errors_to_executions:ratio5m{{{AT}}})", "{{job}} {{device}}"), unit="percentunit")
    b.row("What it costs")
    b.graph("GPU utilization by node (M2)", "Mean of a node's devices.", ("node:verdigris_gpu_utilization:avg5m", "{{node}}"), unit="percentunit", top=1)
    b.graph("GPU memory used (M3)", "Used of total, all devices.", (f"sum(verdigris_gpu_memory_used_bytes{{{gpu}}})", "used"), (f"sum(verdigris_gpu_memory_total_bytes{{{gpu}}})", "total"), unit="bytes")
    b.graph("Executions by op", "Parts of plans a second.", (f"sum by (op) (op_device:verdigris_executions:rate5m{{{OP}}})", "{{op}}"), unit="ops", stack=True)
    b.graph("Device time by op", "Share of the sampled device time that each op takes.", (f"sum by (op) (rate(verdigris_device_seconds_sum{{{OP}}}[15m])) / ignoring (op) group_left () sum(rate(verdigris_device_seconds_sum{{{OP}}}[15m]))", "{{op}}"), unit="percentunit", stack=True, top=1)
    return b.document


def oncall():
    b = Board("verdigris-oncall", "Verdigris: on call", "What fires, then the signs of each failure of the runbook, F1 to F7.", [JOB, NODE, DEVICE, OP_VARIABLE, MODEL], "30s", "3h")
    gpu = 'node=~"$node", device=~"$device"'
    b.text(f"Start at the alert's link to the [runbook]({RUNBOOK}). A device's number inside a container is not its number on the node: compare by node, or by UUID (`nvidia-smi -L`).", height=2)
    b.table("Firing", "All alerts of Verdigris.", 'ALERTS{alertname=~"Verdigris.+", alertstate="firing"}', width=24, height=7, hide=("Value", "alertstate"))
    b.row("F4 hang, F2 driver")
    b.graph("Overdue executions", "Not ended although many times their estimate is over. Anything above zero for a minute is a hang.", (f"max by (node, instance, device) (verdigris_overdue_executions{{{ATN}}})", "{{node}} {{instance}} {{device}}"), steps=above(1), width=8)
    b.graph("Xid events (M5)", "Reported by the driver, within 15 minutes.", (f"sum by (node, device, xid) (increase(verdigris_gpu_xid_events_total{{{gpu}}}[15m]))", "{{node}} {{device}} Xid {{xid}}"), width=8)
    b.graph("GPUs that answer", "1 where NVML answers.", (f"max by (node, device) (verdigris_gpu_up{{{gpu}}})", "{{node}} {{device}}"), width=8, top=1)
    b.row("F1 out of memory")
    b.graph("Errors of memory and failed workspace (M4, M9)", "Within 15 minutes.", (f'sum by (instance, device) (increase(verdigris_errors_total{{{ATN}, kind="out_of_memory"}}[15m]))', "out of memory {{instance}} {{device}}"),
            (f"sum by (instance, device) (increase(verdigris_workspace_failures_total{{{ATN}}}[15m]))", "workspace {{instance}} {{device}}"), width=8)
    b.graph("Device memory (M3)", "Used of total.", (f"max by (node, device) (device:verdigris_gpu_memory_used:ratio{{{gpu}}})", "{{node}} {{device}}"), unit="percentunit", steps=above(0.97), width=8, top=1)
    b.graph("The library's pool", "Reserved from the driver, and used of that.", (f"sum by (instance, device) (verdigris_pool_reserved_bytes{{{ATN}}})", "reserved {{instance}} {{device}}"), (f"sum by (instance, device) (verdigris_pool_used_bytes{{{ATN}}})", "used {{instance}} {{device}}"), unit="bytes", width=8)
    b.row("F3 slow kernel, F6 regression")
    b.graph("p95 of device time (M1)", "By op, all instances.", (f"op_device:verdigris_device_seconds:p95_5m{{{OP}}}", "{{op}} {{device}}"), unit="s", log=True)
    b.graph("Mean time against its own week", "The last hour over the median of the week, as it was a day ago. The alert stands at 1.5.", (f"op_device:verdigris_device_seconds:mean_1h{{{OP}}} / (op_device:verdigris_device_seconds:mean_1h_median1w{{{OP}}} offset 1d)", "{{op}} {{device}}"), steps=above(1.2, 1.5))
    b.graph("Executions far beyond their estimate", "Share of samples.", (f"op_device:verdigris_slow_executions:ratio15m{{{OPN}}}", "{{op}} {{instance}} {{device}}"), unit="percentunit", steps=above(0.1), width=8)
    b.graph("Switches of engines (M8)", "Within an hour.", (f"sum by (op, instance, device) (increase(verdigris_choice_switches_total{{{OPN}}}[1h]))", "{{op}} {{instance}} {{device}}"), steps=above(5), width=8)
    b.graph("Throttled", "1 where clocks are held down, by reason.", (f"max by (node, device, reason) (verdigris_gpu_throttled{{{gpu}}})", "{{node}} {{device}} {{reason}}"), width=8, top=1)
    b.row("F5 results that differ")
    b.graph("Shadow executions beyond their bound (M10)", "Within an hour.", (f'sum by (op, instance, device) (increase(verdigris_drift_checks_total{{{OPN}, outcome="beyond"}}[1h]))', "{{op}} {{instance}} {{device}}"), steps=above(1), width=8)
    b.graph("NaN and infinity", "Sampled results within 15 minutes.", (f"sum by (op, instance, device) (increase(verdigris_nonfinite_total{{{OPN}}}[15m]))", "{{op}} {{instance}} {{device}}"), width=8)
    b.graph("Memory errors", "ECC, within an hour.", (f"sum by (node, device, kind) (increase(verdigris_gpu_ecc_errors_total{{{gpu}}}[1h]))", "{{node}} {{device}} {{kind}}"), width=8)
    b.row("F7 noisy neighbour")
    b.graph("Memory of other processes", "Of the device's, as an application sees it.", (f"device:verdigris_gpu_memory_others:ratio{{{ATN}}}", "{{node}} {{instance}} {{device}}"),
            (f"device:verdigris_gpu_memory_unaccounted:ratio{{{ATN}}}", "not the pool's: {{node}} {{instance}} {{device}}"), unit="percentunit", steps=above(0.1, 0.25), top=1)
    b.graph("Utilization against our own executions", "A device that is busy while we ask little is busy for others.", (f"avg by (node, device) (verdigris_gpu_utilization_ratio{{{gpu}}})", "utilization {{node}} {{device}}"), unit="percentunit", top=1)
    b.row("Service")
    b.graph("p99 of requests (M6)", "Against the objective.", ('model:verdigris_serve_request_seconds:p99_5m{model=~"$model"}', "{{model}}"), ("verdigris:serve_p99_objective:seconds", "objective"), unit="s", width=8)
    b.graph("Queue", "Rows that wait for a batch.", ('sum by (model) (verdigris_serve_queue_rows{model=~"$model"})', "rows {{model}}"), width=8)
    b.graph("Turned away and failed", "Share of requests.", ('model:verdigris_serve_requests_rejected:ratio5m{model=~"$model"}', "turned away {{model}}"), ('model:verdigris_serve_requests_failed:ratio5m{model=~"$model"}', "failed {{model}}"), unit="percentunit", steps=above(0.05), width=8)
    return b.document


def debug():
    b = Board("verdigris-debug", "Verdigris: debug", "By engine, dtype, instance and origin: for those who look for a cause.", [JOB, NODE, DEVICE, OP_VARIABLE, MODEL], "30s", "6h")
    gpu = 'node=~"$node", device=~"$device"'
    b.row("Device time")
    b.heatmap("Device time", "Sampled executions of the chosen ops.", f"sum by (le) (increase(verdigris_device_seconds_bucket{{{OPN}}}[$__rate_interval]))")
    b.graph("p95 by engine and dtype", "From samples.", (f"histogram_quantile(0.95, sum by (op, engine, dtype, le) (rate(verdigris_device_seconds_bucket{{{OPN}}}[5m])))", "{{op}} {{engine}} {{dtype}}"), unit="s", log=True)
    b.graph("p95 by instance", "One machine that is slow among many stands out here.", (f"instance_op_device:verdigris_device_seconds:p95_5m{{{OPN}}}", "{{op}} {{node}} {{instance}} {{device}}"), unit="s", log=True)
    b.table("p50 and p99 lie apart", "p99 over p50: the ops whose time varies most.", f"topk(20, op_device:verdigris_device_seconds:p99_5m{{{OP}}} / op_device:verdigris_device_seconds:p50_5m{{{OP}}})")
    b.graph("Samples", "Taken, skipped for the budget, and lost.", (f"sum by (outcome) (rate(verdigris_samples_total{{{ATN}}}[5m]))", "{{outcome}}"), unit="ops", width=8)
    b.graph("Samples lost", "Share; the alert stands at a tenth.", (f"device:verdigris_samples_lost:ratio15m{{{ATN}}}", "{{instance}} {{device}}"), unit="percentunit", steps=above(0.1), width=8)
    b.graph("Slow executions by engine", "A second.", (f"sum by (op, engine) (rate(verdigris_slow_executions_total{{{OPN}}}[5m]))", "{{op}} {{engine}}"), unit="ops", width=8)
    b.row("Choices and kernels")
    b.graph("Choices by who made them", "Estimate, clock, plan cache, the set that ships, a pin.", (f"sum by (chosen_by) (rate(verdigris_choices_total{{{OPN}}}[5m]))", "{{chosen_by}}"), unit="ops", stack=True, width=8)
    b.graph("Choices by engine", "Of the chosen ops.", (f"sum by (op, engine) (rate(verdigris_choices_total{{{OPN}}}[5m]))", "{{op}} {{engine}}"), unit="ops", stack=True, width=8)
    b.graph("Kernels by origin", "Pack and disk are quick, compiled is not.", (f"sum by (origin) (rate(verdigris_kernels_total{{{ATN}}}[5m]))", "{{origin}}"), unit="ops", stack=True, width=8)
    b.graph("Time of compiling a kernel", "p50 and p95.", (f"histogram_quantile(0.50, sum by (le) (rate(verdigris_kernel_compile_seconds_bucket{{{ATN}}}[15m])))", "p50"), (f"histogram_quantile(0.95, sum by (le) (rate(verdigris_kernel_compile_seconds_bucket{{{ATN}}}[15m])))", "p95"), unit="s", width=8)
    b.graph("Time of planning a graph", "p50 and p95.", (f"histogram_quantile(0.50, sum by (le) (rate(verdigris_plan_seconds_bucket{{{ATN}}}[15m])))", "p50"), (f"histogram_quantile(0.95, sum by (le) (rate(verdigris_plan_seconds_bucket{{{ATN}}}[15m])))", "p95"), unit="s", width=8)
    b.graph("Graphs planned", "A second, by instance. In a steady state there are none.", (f"sum by (instance, device) (rate(verdigris_plans_total{{{ATN}}}[5m]))", "{{instance}} {{device}}"), unit="ops", width=8)
    b.row("Memory")
    b.heatmap("Workspace asked for", "By executions.", f"sum by (le) (increase(verdigris_workspace_bytes_bucket{{{ATN}}}[$__rate_interval]))", unit="bytes", width=8)
    b.graph("Executions by other ways", "By reason, a second.", (f"sum by (reason, instance) (rate(verdigris_fallbacks_total{{{ATN}}}[5m]))", "{{reason}} {{instance}}"), unit="ops", width=8)
    b.graph("Pool growth", "Times that it took more memory, within 15 minutes.", (f"sum by (instance, device) (increase(verdigris_pool_grown_total{{{ATN}}}[15m]))", "{{instance}} {{device}}"), width=8)
    b.graph("Errors by kind", "A second.", (f"sum by (kind, device) (kind_device:verdigris_errors:rate5m{{{AT}}})", "{{kind}} {{device}}"), unit="ops", width=8)
    b.graph("Device memory by process", "This process and all others.", (f"max by (node, instance, device, process) (verdigris_gpu_process_memory_bytes{{{ATN}}})", "{{node}} {{instance}} {{device}} {{process}}"), unit="bytes", width=8)
    b.graph("Workspace had, of what was asked for", "By bytes. Below 1, executions fell back to ways that need less, or did not run.",
            (f"sum by (instance, device) (rate(verdigris_workspace_had_bytes_sum{{{ATN}}}[15m])) / sum by (instance, device) (rate(verdigris_workspace_bytes_sum{{{ATN}}}[15m]))", "{{instance}} {{device}}"), unit="percentunit", width=8, top=1)
    b.row("Accuracy")
    b.heatmap("Error over its bound", "Of shadow executions: above 1 is drift.", f"sum by (le) (increase(verdigris_drift_ratio_bucket{{{OPN}}}[$__rate_interval]))", unit="short")
    b.graph("Shadow executions", "Within and beyond, a second.", (f"sum by (op, outcome) (rate(verdigris_drift_checks_total{{{OPN}}}[5m]))", "{{op}} {{outcome}}"), unit="ops")
    b.heatmap("Nearness of overflow", "Largest magnitude of results that were looked at, over the largest that their type holds.", f"sum by (le) (increase(verdigris_amax_ratio_bucket{{{OPN}}}[$__rate_interval]))", unit="short")
    b.graph("Results looked at", "For NaN and infinity, a second; and looks left out, by guard and reason.", (f"sum by (op) (rate(verdigris_number_checks_total{{{OPN}}}[5m]))", "{{op}}"), (f"sum by (guard, reason) (rate(verdigris_guard_skips_total{{{ATN}}}[5m]))", "left out: {{guard}} {{reason}}"), unit="ops")
    b.row("Devices")
    b.graph("Clocks", "SM and memory.", (f"verdigris_gpu_sm_clock_hertz{{{gpu}}}", "SM {{node}} {{device}}"), (f"verdigris_gpu_memory_clock_hertz{{{gpu}}}", "memory {{node}} {{device}}"), unit="hertz", width=8)
    b.graph("Temperature", "Of the chip.", (f"verdigris_gpu_temperature_celsius{{{gpu}}}", "{{node}} {{device}}"), unit="celsius", width=8)
    b.graph("Power", "By device.", (f"verdigris_gpu_power_watts{{{gpu}}}", "{{node}} {{device}}"), unit="watt", width=8)
    b.graph("Utilization", "Compute, and the memory interface.", (f"verdigris_gpu_utilization_ratio{{{gpu}}}", "compute {{node}} {{device}}"), (f"verdigris_gpu_memory_utilization_ratio{{{gpu}}}", "memory {{node}} {{device}}"), unit="percentunit", top=1)
    b.table("Devices in MIG mode", "1 where a device is cut into instances.", f"max by (node, device) (verdigris_gpu_mig_enabled{{{gpu}}})")
    b.row("Service")
    b.heatmap("Rows of a batch (M7)", "Few rows a batch: the service waits too short or is asked too little.", 'sum by (le) (increase(verdigris_serve_batch_rows_bucket{model=~"$model"}[$__rate_interval]))', unit="short", width=8)
    b.graph("Mean batch", "Rows.", ('model:verdigris_serve_batch_rows:avg5m{model=~"$model"}', "{{model}}"), width=8)
    b.graph("Queue time", "p95.", ('model:verdigris_serve_queue_seconds:p95_5m{model=~"$model"}', "{{model}}"), unit="s", width=8)
    b.row("The telemetry itself")
    b.table("Builds", "Which build runs where.", f'max by (job, node, instance, version, source) (verdigris_build_info{{job=~"$job", node=~"$node"}})', hide=("Value",))
    b.graph("Series refused", "Label sets that the bound on series turned away.", ('sum by (instance) (increase(verdigris_series_refused_total{job=~"$job", node=~"$node"}[1h]))', "{{instance}}"), steps=above(1))
    return b.document


DASHBOARDS = {"executive.json": executive, "oncall.json": oncall, "debug.json": debug}


def written(document):
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file differs")
    check = parser.parse_args().check
    folder, stale = Path(__file__).parent, []
    for name, make in DASHBOARDS.items():
        path, text = folder / name, written(make())
        if check:
            stale += [] if path.is_file() and path.read_text(encoding="utf-8") == text else [name]
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"not what dashboards.py writes: {', '.join(stale)}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
