"""Fits the learned part of the cost model to records of `bench choice`.

    workshop bench features RECORD... --out samples.jsonl      # what the model reads of each config that was timed
    python3 bench/model/fit.py samples.jsonl --out crates/verdigris-engines/src/cost/h200.fit

The target is the logarithm of measured over analytic time. The loss has two terms: how far the estimate is off, configs near the fastest of their
problem counting most, and a listwise one, which asks that the fastest come first. What is printed is from folds that the fit did not see: how much
longer the config with the least estimate takes than the fastest that was timed, by class, and the error of the estimate by kernel.

Needs PyTorch; a GPU (`--device cuda`) is some ten times as fast as two cores, and no need.
"""

import argparse
import json
import math
import sys

import torch

KERNEL_WIDTH = 8
LIMIT = 2.0
# The share of samples whose kernel is hidden from the network, so that it learns what all kernels have in common.
HIDE = 0.04


class Nets(torch.nn.Module):
    """So many networks side by side, trained at once on the same batches: a GPU has room for many. They differ by their beginnings alone."""

    def __init__(self, features, kernels, hidden, count):
        super().__init__()
        inputs = features + KERNEL_WIDTH

        def layer(rows, columns):
            bound = 1 / math.sqrt(rows)
            values = [torch.empty(count, rows, columns), torch.empty(count, 1, columns)]
            return [torch.nn.Parameter(torch.nn.init.uniform_(value, -bound, bound)) for value in values]

        self.kernel = torch.nn.Parameter(torch.nn.init.normal_(torch.empty(count, kernels + 1, KERNEL_WIDTH), std=0.3))
        self.w1, self.b1 = layer(inputs, hidden[0])
        self.w2, self.b2 = layer(*hidden)
        self.w3, self.b3 = layer(hidden[1], 1)
        # A kernel that is not known has none of what is learned of kernels.
        self.register_buffer("known", (torch.arange(kernels + 1) < kernels).float()[:, None])
        torch.nn.init.zeros_(self.w3)

    def forward(self, x, kernel):
        """Of rows of configs: a number for each network, row and config."""
        count, rows = len(self.w1), kernel.numel()
        known = (self.kernel * self.known)[:, kernel.reshape(-1)]
        x = torch.cat([x.reshape(1, rows, -1).expand(count, -1, -1), known], -1)
        h = torch.relu(torch.baddbmm(self.b1, x, self.w1))
        h = torch.relu(torch.baddbmm(self.b2, h, self.w2))
        return torch.baddbmm(self.b3, h, self.w3).reshape(count, *kernel.shape).clamp(-LIMIT, LIMIT)


def is_named(names, engine, words):
    """Whether a config of a problem is one of an engine that is named, or one of those with a word behind the engine, of a problem that is told with it."""
    return any(engine == of and (not word or word in words.split()) for of, _, word in (name.partition(" ") for name in names))


class Data:
    """Problems as padded rows of configs."""

    def __init__(self, paths, older=(), leave_out=()):
        self.names, self.problems = None, []
        for path in [*paths, *older]:
            with open(path) as lines:
                head = json.loads(next(lines))["features"]
                assert self.names in (None, head), "samples of two versions of the model"
                self.names = head
                for line in lines:
                    row = json.loads(line)
                    samples = [s for s in row["samples"] if (s[4] or s[3])]
                    if path in older:
                        samples = [s for s in samples if not is_named(leave_out, s[0], row["words"])]
                    if len(samples) > 1:
                        self.problems.append((row, samples))
        self.kernels = sorted({s[1] for _, samples in self.problems for s in samples})
        index = {name: i for i, name in enumerate(self.kernels)}
        width = max(len(samples) for _, samples in self.problems)
        count, features = len(self.problems), len(self.names)
        self.x = torch.zeros(count, width, features)
        self.kernel = torch.full((count, width), len(self.kernels))
        self.base = torch.zeros(count, width)
        self.time = torch.full((count, width), math.inf)
        self.weight = torch.zeros(count, width)
        for i, (_, samples) in enumerate(self.problems):
            for j, (_, kernel, base, screen, us, x) in enumerate(samples):
                self.x[i, j] = torch.tensor(x)
                self.kernel[i, j] = index[kernel]
                self.base[i, j] = math.log(base)
                self.time[i, j] = math.log(us or screen)
                # A brief trial says less than a median of blocks.
                self.weight[i, j] = 1.0 if us else 0.6
        self.mask = self.weight > 0
        best = self.time.min(1, keepdim=True).values
        self.gap = torch.where(self.mask, self.time - best, torch.zeros(()))
        self.weight = self.weight / (1 + 3 * self.gap)
        flat = self.x[self.mask]
        step = max(1, len(flat) // 200_000)
        few = flat[::step]
        self.least = few.quantile(0.001, 0)
        self.most = few.quantile(0.999, 0)
        same = self.most - self.least < 1e-6
        self.most = torch.where(same, self.least + 1e-6, self.most)
        clipped = few.clamp(self.least, self.most)
        self.mean, self.scale = clipped.mean(0), clipped.std(0).clamp_min(1e-3)
        self.x = (self.x.clamp(self.least, self.most) - self.mean) / self.scale

    def to(self, device):
        """The same with what a fit reads on another device."""
        for name in ("x", "kernel", "base", "time", "weight", "mask", "gap"):
            setattr(self, name, getattr(self, name).to(device))
        return self


def loss_of(nets, data, rows, temperature):
    """The sum of what each network's loss is, so that none has a share in another's."""
    x, kernel, mask = data.x[rows], data.kernel[rows], data.mask[rows]
    hidden = torch.rand(kernel.shape) < HIDE
    kernel = torch.where(hidden, torch.full_like(kernel, len(data.kernels)), kernel)
    out = nets(x, kernel) + data.base[rows]
    weight = data.weight[rows] / data.weight[rows].sum()
    score = torch.log_softmax(torch.where(mask, -out / temperature, torch.tensor(-1e9)), -1)

    error = torch.where(mask, out - data.time[rows].where(mask, torch.zeros(())), torch.zeros(()))
    near = torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=0.15) * weight
    order = torch.softmax(torch.where(mask, -data.time[rows] / temperature, torch.tensor(-1e9)), -1)
    return near.sum() * 20 - (order * score).sum(-1).mean(-1).sum()


def train(data, rows, options):
    torch.manual_seed(options.seed)
    nets = Nets(len(data.names), len(data.kernels), options.hidden, options.ensemble)
    optimizer = torch.optim.AdamW(nets.parameters(), lr=3e-3, weight_decay=options.decay)
    batch = 256
    steps = options.epochs * math.ceil(len(rows) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    for _ in range(options.epochs):
        order = rows[torch.randperm(len(rows))]
        for first in range(0, len(order), batch):
            optimizer.zero_grad()
            loss_of(nets, data, order[first : first + batch], options.temperature).backward()
            clip(nets)
            optimizer.step()
            schedule.step()
    return nets.eval()


def clip(nets):
    """Each network's gradient to a norm of 1 at most, whatever the others' are."""
    gradients = [value.grad for value in nets.parameters()]
    squares = sum(gradient.square().sum(tuple(range(1, gradient.dim()))) for gradient in gradients)
    shares = (1 / squares.sqrt().clamp_min(1e-12)).clamp_max(1)
    for gradient in gradients:
        gradient.mul_(shares.reshape(-1, *[1] * (gradient.dim() - 1)))


def predict(nets, data, rows, own=False):
    """What the networks say in the mean, which has less of the chance of one; `own`: what each does."""
    with torch.no_grad():
        estimates = [nets(data.x[part], data.kernel[part]) for part in rows.split(512)]
        estimates = torch.cat(estimates, 1) + data.base[rows]
        return torch.where(data.mask[rows], estimates if own else estimates.mean(0), torch.tensor(math.inf))


def regret(data, rows, estimate):
    chosen = estimate.argmin(1)
    return data.gap[rows].gather(1, chosen[:, None])[:, 0]


def line(name, gaps):
    ratio = gaps.exp()
    print(
        f"{name:38} {len(gaps):5}  {gaps.mean().exp():6.3f}  {100 * (ratio <= 1.15).float().mean():5.1f} %"
        f"  {int((ratio > 1.5).sum()):4}  {ratio.max():6.2f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", nargs="+")
    parser.add_argument("--out")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--hidden", type=int, nargs=2, default=[160, 96], help="neurons of the two layers, as `cost/residual.rs` has them")
    parser.add_argument("--decay", type=float, default=0.05, help="weight decay")
    parser.add_argument("--temperature", type=float, default=0.15, help="listwise: differences of this share of the time count as one unit")
    parser.add_argument("--folds", type=int, default=5, help="0 for none")
    parser.add_argument("--hold", help="samples to judge by that are not fitted to", nargs="*", default=[])
    parser.add_argument("--older", help="samples that were timed before some kernels changed", nargs="*", default=[])
    parser.add_argument("--leave-out", help="whose kernels: an engine, or with a word of its problems behind it (`conv.unfolded channels-first`)", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ensemble", type=int, default=4, help="networks whose mean is the estimate")
    parser.add_argument("--device", default="cpu", help="where the fit runs")
    arguments = parser.parse_args()
    data = Data(arguments.samples + arguments.hold, arguments.older, arguments.leave_out).to(arguments.device)
    torch.set_default_device(arguments.device)
    held = set()
    for path in arguments.hold:
        with open(path) as lines:
            next(lines)
            held |= {json.loads(line)["problem"] for line in lines}
    all_rows = torch.arange(len(data.problems))
    is_held = torch.tensor([row["problem"] in held for row, _ in data.problems])
    rows = all_rows[~is_held]
    print(f"{len(rows)} problems, {int(data.mask[rows].sum())} configs, {len(data.kernels)} kernels, {len(data.names)} features")
    print(f"{'choice by estimate':38} {'of':>5}  {'mean':>6}  {'<1.15':>7}  {'>1.5':>4}  {'most':>6}")
    base = torch.where(data.mask, data.base, torch.tensor(math.inf))
    line("analytic alone", regret(data, rows, base[rows]))
    judged = []
    if arguments.folds:
        fold = (torch.randperm(len(rows), generator=torch.Generator("cpu").manual_seed(7), device="cpu") % arguments.folds).to(rows.device)
        for i in range(arguments.folds):
            net = train(data, rows[fold != i], arguments)
            judged.append((rows[fold == i], predict(net, data, rows[fold == i])))
            print(f"fold {i}", file=sys.stderr)
    final = train(data, rows, arguments)
    if is_held.any():
        held_rows = all_rows[is_held]
        line("held out", regret(data, held_rows, predict(final, data, held_rows)))
        for number, estimate in enumerate(predict(final, data, held_rows, own=True)):
            line(f"  network {number} alone", regret(data, held_rows, estimate))
    if judged:
        seen, estimate = torch.cat([r for r, _ in judged]), torch.cat([e for _, e in judged])
        gaps = regret(data, seen, estimate)
        line("on folds that were not fitted to", gaps)
        classes = {}
        for place, row in enumerate(seen.tolist()):
            problem = data.problems[row][0]
            kind = problem["problem"].split("/")[1]
            words = problem["words"].split()
            what = kind if kind == "product" else words[1]
            classes.setdefault(what, []).append(place)
            classes.setdefault(f"{kind} {problem['dtype']}", []).append(place)
        for name in sorted(classes):
            line("  " + name, gaps[torch.tensor(classes[name])])
        error = (estimate - data.time[seen]).where(data.mask[seen], torch.zeros(()))
        near = data.mask[seen] & (data.gap[seen] < 1.0)
        print(f"{'error of the estimate':38} {'of':>5}  {'bias':>6}  {'rms':>6}")
        for i, name in enumerate(data.kernels):
            of = near & (data.kernel[seen] == i)
            if of.any():
                values = error[of]
                print(f"  {name:36} {len(values):5}  {values.mean():+6.3f}  {values.square().mean().sqrt():6.3f}")
        worst = gaps.argsort(descending=True)[:25]
        for place in worst.tolist():
            row = int(seen[place])
            samples = data.problems[row][1]
            chosen, best = int(estimate[place].argmin()), int(data.time[row].argmin())
            print(
                f"  {gaps[place].exp():5.2f}  {data.problems[row][0]['words']}: {samples[chosen][0]} {samples[chosen][1]} "
                f"(est {estimate[place][chosen].exp():.1f}, took {data.time[row][chosen].exp():.1f}) "
                f"for {samples[best][0]} (est {estimate[place][best].exp():.1f}, took {data.time[row][best].exp():.1f})"
            )
    if arguments.out:
        write(final.cpu(), data, rows, arguments.out)


def write(net, data, rows, path):
    """The fit as `crates/verdigris-engines/src/cost/residual.rs` reads it: text, an empty line, and numbers of f32."""
    inputs = len(data.names)
    seeds = ", ".join(sorted({data.problems[i][0]["problem"].rsplit("/", 2)[0] for i in rows.tolist()}))
    configs = int(data.mask[rows].sum())
    text = [
        f"Fitted by `bench/model/fit.py` to {configs} configs of {len(rows)} problems ({seeds}), timed on NVIDIA H200s.",
        f"features: {', '.join(data.names)}",
        f"kernels: {', '.join(data.kernels)}",
        f"limit: {LIMIT:g}",
        f"networks: {len(net.w1)}",
    ]
    assert not any(", " in name for name in [*data.names, *data.kernels]), "names are separated so"
    numbers = [data.mean, data.scale, data.least, data.most]
    values = [value.detach() for value in (net.w1, net.b1, net.w2, net.b2, net.w3, net.b3, net.kernel)]
    for w1, b1, w2, b2, w3, b3, kernel in zip(*values):
        # What stands for a kernel comes to the same as biases of the first layer. One that was never seen has what the others have in common.
        biases = b1 + kernel[: len(data.kernels)] @ w1[inputs:]
        numbers += [b1, biases, w1[:inputs], w2, b2, w3, b3]
    with open(path, "wb") as out:
        out.write(("\n".join(text) + "\n\n").encode())
        out.write(torch.cat([value.cpu().float().flatten() for value in numbers]).numpy().astype("<f4").tobytes())


if __name__ == "__main__":
    main()
