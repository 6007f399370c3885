"""Seconds of one Dreamer update, against a plain eager version of the same mathematics and a floor.

    python tests/benchmarks/dreamer_update.py                          # 1m, 16 x 64, one thread
    python tests/benchmarks/dreamer_update.py --threads 2 --rounds 10
    python tests/benchmarks/dreamer_update.py --size tiny --batch-length 16 --num-bins 63

The two versions take turns, so that a busy machine slows both: trust the ratio. With one thread the
clock is the processor's, which does not count the turns of others. The plain version is what one
writes first: block matrices over repeated inputs, softmax over the last dimension, multinomial
samples, dense two-hot targets, everything inside the time loop, one parameter at a time in the
optimiser. The floor is the operations of one update's matrix products divided by what this
processor reaches on one large product.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import dreamer_actor_loss as dreamer

OBS_DIM, NUM_ACTIONS = 24, 6


class PlainRSSM(dreamer.RSSM):
    """The same parameters, the straightforward operations."""

    def latents(self, logits):
        return logits.unflatten(-1, (self.stoch, self.classes))

    def sample(self, logits):
        probs = plain_unimix(self.latents(logits)).exp()
        flat = probs.detach().reshape(-1, self.classes)
        onehot = F.one_hot(torch.multinomial(flat, 1).squeeze(-1), self.classes).to(probs)
        return (onehot.view_as(probs) + (probs - probs.detach())).flatten(-2)

    def core(self, deter, stoch, action_features):
        blocks = self.blocks
        inputs = torch.cat([self.in_deter(deter), self.in_stoch(stoch), action_features], -1)
        repeated = inputs.unsqueeze(-2).expand(*inputs.shape[:-1], blocks, -1)
        x = torch.cat([deter.unflatten(-1, (blocks, -1)), repeated], -1)
        shared = self.mix_inputs.weight.t().unflatten(-1, (blocks, -1)).transpose(0, 1)
        weight = torch.cat([self.mix_deter.weight, shared], 1)
        mixed = (torch.einsum("...gi,gio->...go", x, weight) + self.mix_deter.bias).flatten(-2)
        mixed = self.mix_norm(mixed).unflatten(-1, (blocks, -1))
        gates = torch.einsum("...gi,gio->...go", mixed, self.gates.weight) + self.gates.bias
        reset, candidate, update = gates.chunk(3, -1)
        update = torch.sigmoid(update - 1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        deter = deter.unflatten(-1, (blocks, -1))
        return (update * candidate + (1 - update) * deter).flatten(-2)

    def observe(self, tokens, prev_actions, is_first, deter, stoch):
        steps = []
        for t in range(len(tokens)):
            keep = 1 - is_first[t].unsqueeze(-1)
            action = self.in_action(dreamer.squash_action(prev_actions[t]) * keep)
            deter = self.core(deter * keep, stoch * keep, action)
            logits = self.post_out(self.post_deter(deter) + self.post_tokens(tokens[t]))
            stoch = self.sample(logits)
            steps.append((deter, stoch, logits))
        return tuple(torch.stack(parts) for parts in zip(*steps))


def plain_unimix(logits, amount=0.01):
    return torch.log((1 - amount) * F.softmax(logits, -1) + amount / logits.shape[-1])


def plain_sample_onehot(probs):
    index = torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1).squeeze(-1)
    return F.one_hot(index, probs.shape[-1]).to(probs).view_as(probs)


def plain_twohot_loss(logits, target, bins):
    target = target.clamp(bins[0], bins[-1])
    above = torch.searchsorted(bins, target.contiguous(), right=True).clamp(1, len(bins) - 1)
    share = ((target - bins[above - 1]) / (bins[above] - bins[above - 1])).unsqueeze(-1)
    low, high = (F.one_hot(index, len(bins)).to(logits) for index in (above - 1, above))
    return -(((1 - share) * low + share * high) * F.log_softmax(logits, -1)).sum(-1)


def plain_critic_loss(logits, returns, slow_values, weights, bins):
    losses = [plain_twohot_loss(logits, part.detach(), bins) for part in (returns, slow_values)]
    return (weights.detach() * sum(losses)).mean()


class PlainLaProp(dreamer.LaProp):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    zeros = torch.zeros_like(p)
                    self.state[p] = {"step": 0, "momentum": zeros, "square": zeros.clone()}
                state, beta1, beta2 = self.state[p], group["beta1"], group["beta2"]
                state["step"] += 1
                limit = group["clip"] * p.norm().clamp(min=1e-3)
                grad = p.grad / (p.grad.norm() / limit).clamp(min=1)
                state["square"].mul_(beta2).add_((1 - beta2) * grad * grad)
                scale = (state["square"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                state["momentum"].mul_(beta1).add_((1 - beta1) * grad / scale)
                p -= group["lr"] * state["momentum"] / (1 - beta1 ** state["step"])


PLAIN = {
    "RSSM": PlainRSSM, "unimix": plain_unimix, "sample_onehot": plain_sample_onehot,
    "twohot_loss": plain_twohot_loss, "critic_loss": plain_critic_loss, "LaProp": PlainLaProp,
}  # fmt: skip
OURS = {name: getattr(dreamer, name) for name in PLAIN}


class Learner:
    """Agent, optimiser and replay of one version; `step` makes one update."""

    def __init__(self, version, args):
        self.version, self.args = version, args
        vars(dreamer).update(version)
        torch.manual_seed(0)
        self.agent = dreamer.Dreamer(OBS_DIM, NUM_ACTIONS, (NUM_ACTIONS,), args)
        parameters = [p for p in self.agent.parameters() if p.requires_grad]
        self.optimizer = dreamer.LaProp(parameters, 4e-5)
        sizes = OBS_DIM, NUM_ACTIONS, *self.agent.rssm.sizes
        self.replay, rng = dreamer.Replay(2000, 1, *sizes), np.random.default_rng(0)
        for step in range(1000):
            flag = np.zeros(1)
            self.replay.add(
                np.zeros(1, int), obs=rng.normal(size=(1, OBS_DIM)), reward=rng.normal(size=1),
                action=np.eye(NUM_ACTIONS)[rng.integers(NUM_ACTIONS, size=1)],
                is_first=flag + (step % 100 == 0), is_last=flag + (step % 100 == 99),
                is_terminal=flag, deter=np.zeros((1, sizes[2])), stoch=np.zeros((1, sizes[3])),
            )  # fmt: skip

    def step(self, clock=time.perf_counter):
        vars(dreamer).update(self.version)
        start = clock()
        metrics = dreamer.train_step(self.agent, self.optimizer, self.replay, self.args)
        return clock() - start, metrics


def processor_speed(clock):
    """Floating point operations per second of one large float32 matrix product."""
    a, b, times = torch.randn(2048, 512), torch.randn(512, 512), []
    for _ in range(30):
        start = clock()
        a @ b
        times.append(clock() - start)
    return 2 * 2048 * 512 * 512 / min(times)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1m")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--batch-length", type=int, default=64)
    parser.add_argument("--num-bins", type=int, default=255)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.threads == 1 else time.perf_counter
    names = "size", "batch_size", "batch_length", "num_bins"
    args = dreamer.Args(**{name: getattr(given, name) for name in names})
    ours, plain = Learner(OURS, args), Learner(PLAIN, args)
    with FlopCounterMode(display=False) as counter:
        _, metrics = ours.step()
    _, plain_metrics = plain.step()
    for name, value in metrics.items():  # the same mathematics up to which samples were drawn
        assert abs(value - plain_metrics[name]) <= 0.05 + 0.2 * abs(value), name
    seconds = {"ours": [], "plain": []}
    for _ in range(given.rounds):
        for name, learner in (("plain", plain), ("ours", ours)):
            seconds[name].append(learner.step(clock)[0])
    ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["plain"]))
    flops, speed = counter.get_total_flops(), processor_speed(clock)
    for name, values in seconds.items():
        median = 1e3 * statistics.median(values)
        print(f"{name}: median {median:.0f} ms, best {1e3 * min(values):.0f} ms")
    print(f"plain / ours, median of {given.rounds} pairs: {ratio:.2f}")
    print(
        f"floor: {flops / 1e9:.1f} GFLOP of matrix products at {speed / 1e9:.0f} GFLOP/s = "
        f"{1e3 * flops / speed:.0f} ms, ours is {min(seconds['ours']) * speed / flops:.1f} times it"
    )


if __name__ == "__main__":
    main()
