"""dreamer_actor_loss.py against golden numbers, brute force, closed forms and its own gradients.

python -m pytest tests/test_dreamer.py -k "not learns"  # without CartPole's two minutes
"""

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import dreamer_actor_loss as dreamer

torch.set_num_threads(1)
GOLDEN = json.loads((Path(__file__).parent / "dreamer_golden.json").read_text())


def array(values):
    return torch.tensor(values, dtype=torch.float64)


def time_first(values):
    """The golden file is [B, T, ...], the script [T, B, ...]."""
    return array(values).transpose(0, 1).contiguous()


def close(actual, expected, rtol=1e-7, atol=1e-8):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=rtol, atol=atol
    )


def dense_logits(sparse, num_bins=255):
    logits = torch.zeros(len(sparse), len(sparse[0]), num_bins, dtype=torch.float64)
    for b, t in itertools.product(range(len(sparse)), range(len(sparse[0]))):
        for index, value in sparse[b][t].items():
            logits[b, t, int(index)] = value
    return logits.transpose(0, 1)


def small_args(**options):
    row = {"deter": 16, "hidden": 8, "stoch": 3, "classes": 4, "units": 8, "layers": 1, "blocks": 2}
    batch = {"batch_size": 3, "batch_length": 6, "horizon": 4, "num_bins": 15}
    return dreamer.Args(**(row | batch | options))


def small_agent(obs_dim=2, nvec=(3,), action_dim=3, **options):
    torch.manual_seed(0)
    args = small_args(**options)
    return dreamer.Dreamer(obs_dim, action_dim, nvec, args), args


def filled_replay(agent, num_envs=2, steps=60, length=10, obs_dim=2, action_dim=3):
    """Random episodes of `length` records."""
    rssm, rng = agent.rssm, np.random.default_rng(0)
    replay = dreamer.Replay(1000, num_envs, obs_dim, action_dim, *rssm.sizes)
    for step in range(steps):
        last = np.full(num_envs, float(step % length == length - 1))
        action = np.eye(action_dim)[rng.integers(action_dim, size=num_envs)] * (1 - last[:, None])
        replay.add(
            np.arange(num_envs),
            obs=rng.normal(size=(num_envs, obs_dim)),
            reward=rng.normal(size=num_envs),
            is_first=np.full(num_envs, float(step % length == 0)),
            is_last=last,
            is_terminal=last,
            action=action,
            deter=np.zeros((num_envs, rssm.sizes[0])),
            stoch=np.zeros((num_envs, rssm.sizes[1])),
        )
    return replay


# golden numbers ----------------------------------------------------------------------------------


def test_symlog_and_symexp():
    close(dreamer.symlog(array(GOLDEN["symlog"]["x"])), GOLDEN["symlog"]["y"])
    close(dreamer.symexp(array(GOLDEN["symexp"]["x"])), GOLDEN["symexp"]["y"])
    x = array([-1000, -1, 0, 1, 1e6]).requires_grad_()
    close(dreamer.symexp(dreamer.symlog(x)), x.detach(), rtol=1e-5)
    zero = torch.zeros((), requires_grad=True)
    torch.log1p(
        zero.abs()
    )  # the naive gradient at 0 is 0 because sign(0) = 0; nothing here differentiates there
    assert dreamer.symlog(array(1e6)).item() == pytest.approx(13.8155, abs=1e-4)


def test_unimix():
    golden = GOLDEN["unimix"]
    mixed = dreamer.unimix(array(golden["logits"]), golden["u"])
    close(mixed.exp(), golden["probs"])
    close(mixed, golden["mixed_logits"])
    close(-(mixed.exp() * mixed).sum(-1), golden["entropy"])
    for classes in (2, 18, 32):  # a mix that is not divided by K would be 2%, 15%, 24%
        logits = torch.zeros(classes, dtype=torch.float64)
        logits[0] = 1000
        close(dreamer.unimix(logits).exp().min(), 0.01 / classes)


def test_kl_free_bits_values_and_gradients():
    golden = GOLDEN["kl_free_bits"]
    post, prior = array(golden["post"]).requires_grad_(), array(golden["prior"]).requires_grad_()
    close(dreamer.kl_losses(post, prior, 0.0)[0].detach(), golden["kl_raw"])
    dyn, rep = dreamer.kl_losses(post, prior)
    close(dyn.detach(), golden["dyn"])
    close(rep.detach(), golden["rep"])
    (dyn + 0.1 * rep).sum().backward()
    close(post.grad, golden["grad_post"], rtol=0, atol=2e-6)
    close(prior.grad, golden["grad_prior"], rtol=0, atol=2e-6)
    assert (post.grad[1] == 0).all() and (prior.grad[1] == 0).all(), (
        "below the free bits the gradient is exactly 0"
    )
    assert not torch.allclose(dyn, array(golden["kl_without_unimix_WRONG"]), atol=0.1)
    assert not torch.allclose(dyn, array(golden["clip_per_latent_WRONG"]), atol=0.1)


def test_kl_gradients_reach_one_side_only():
    post, prior = torch.randn(2, 5, 3, 4).mul(3).unbind()
    for index, (moves, stays) in enumerate((("prior", "post"), ("post", "prior"))):
        leaf = {"post": post.clone().requires_grad_(), "prior": prior.clone().requires_grad_()}
        dreamer.kl_losses(leaf["post"], leaf["prior"])[index].sum().backward()
        assert leaf[moves].grad.abs().sum() > 0 and leaf[stays].grad is None


def test_twohot_symexp():
    golden = GOLDEN["twohot_symexp"]
    bins = dreamer.twohot_bins(golden["n_bins"])
    close(bins, golden["bins"])
    assert bins[127] == 0 and (bins == -bins.flip(0)).all()
    for case in golden["encode"]:
        # the gradient of the loss with respect to the logits is softmax - target
        logits = torch.zeros(255, dtype=torch.float64, requires_grad=True)
        dreamer.twohot_loss(logits, array(case["target"]), bins).backward()
        weights = 1 / 255 - logits.grad
        expected = torch.zeros(255, dtype=torch.float64)
        expected[case["idx"]] = array(case["weight"])
        close(weights, expected, atol=1e-7)
        close((weights * bins).sum(), case["decode"], rtol=1e-6, atol=1e-6)
    logits, target = array(golden["loss"]["logits"]), array(golden["loss"]["target"])
    close(dreamer.twohot_loss(logits, target, bins), golden["loss"]["loss"])
    squashed = dreamer.twohot_loss(
        logits, dreamer.symlog(target), dreamer.symlog(bins)
    )  # the 2023 version
    assert not torch.allclose(squashed, array(golden["loss"]["loss"]), atol=1e-3)
    zeros = torch.zeros(255)
    assert dreamer.twohot_loss(zeros, torch.tensor(3.0), bins.float()).item() == pytest.approx(
        golden["loss_zero_logits"]
    )
    assert dreamer.twohot_mean(zeros, bins.float()).item() == 0.0, (
        "float32 zero logits decode to exactly 0"
    )
    for case, expected in zip(
        golden["pred_peaked"]["logits_nonzero"], golden["pred_peaked"]["pred_float64"]
    ):
        logits = torch.zeros(255, dtype=torch.float64)
        for index, value in case.items():
            logits[int(index)] = value
        close(dreamer.twohot_mean(logits, bins), expected, rtol=1e-5, atol=1e-5)
        close(dreamer.twohot_mean(logits.float(), bins.float()), expected, rtol=1e-2, atol=1e-1)


def test_twohot_2023_uses_the_same_machine_in_symlog_space():
    """The 2023 encoding is our loss with squashed bins and targets, and not today's."""
    bins, told_apart = torch.linspace(-20, 20, 255, dtype=torch.float64), 0
    for old, new in zip(GOLDEN["twohot_symlog_2023"]["encode"], GOLDEN["twohot_symexp"]["encode"]):
        logits = torch.zeros(255, dtype=torch.float64, requires_grad=True)
        dreamer.twohot_loss(logits, dreamer.symlog(array(old["target"])), bins).backward()
        close((1 / 255 - logits.grad)[old["idx"]], old["weight"], atol=1e-6)
        told_apart += max(abs(a - b) for a, b in zip(old["weight"], new["weight"])) > 1e-3
    assert told_apart >= 5


@pytest.mark.parametrize("name", list(GOLDEN["lambda_return"]))
def test_lambda_return(name):
    golden = GOLDEN["lambda_return"][name]
    last, term, reward, boot = (time_first(golden[k]) for k in ("last", "term", "reward", "boot"))
    lam = golden["lam"] * (1 - last)
    returns = dreamer.lambda_return(reward, golden["disc"] * (1 - term), boot, lam)
    close(returns, time_first(golden["ret"]))
    if "ret_if_reward_shifted_WRONG" in golden:
        assert not torch.allclose(
            returns, time_first(golden["ret_if_reward_shifted_WRONG"]), atol=0.01
        )


def test_lambda_return_by_hand():
    def column(*values):
        return array(values)[:, None]

    one = torch.ones(4, 1, dtype=torch.float64)
    close(dreamer.lambda_return(column(0, 1, 0, 0), one, 0 * one, 1.0)[:, 0], [1, 0, 0])
    reward, values = column(9, 1, 2, 3), column(0, 10, 20, 30)
    close(dreamer.lambda_return(reward, 0.9 * one, values, 0.95)[:, 0], [25.86025, 28.55, 30.0])
    close(
        dreamer.lambda_return(reward, 0.9 * column(1, 1, 0, 1), values, 0.95)[:, 0],
        [3.16, 2.0, 30.0],
    )
    close(dreamer.lambda_return(column(9, 1, 1), one[:3], column(0, 5, 7), 0.0)[:, 0], [6, 8])
    close(dreamer.lambda_return(column(9, 1, 1), one[:3], column(0, 5, 7), 1.0)[:, 0], [9, 8])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 10**6))
def test_lambda_return_is_a_mixture_of_n_step_returns(horizon, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, continues, values = torch.rand(
        3, horizon + 1, 1, dtype=torch.float64, generator=generator
    )
    n_step = []
    for n in range(1, horizon + 1):
        discount, total = 1.0, 0.0
        for t in range(1, n + 1):
            total += discount * rewards[t].item()
            discount *= continues[t].item()
        n_step.append(total + discount * values[n].item())
    mix = [(1 - lam) * lam ** (n - 1) for n in range(1, horizon)] + [lam ** (horizon - 1)]
    expected = sum(a * b for a, b in zip(mix, n_step))
    assert dreamer.lambda_return(rewards, continues, values, lam)[0, 0].item() == pytest.approx(
        expected
    )


@pytest.mark.parametrize("name, rate", [("head_default", 0.01), ("rate_0.1", 0.1)])
def test_return_normalizer(name, rate):
    golden = GOLDEN["return_normaliser"]
    normalizer = dreamer.ReturnNormalizer(rate).double()
    for i, batch in enumerate(golden["batches"]):
        normalizer.update(array(batch))
        close(normalizer.scale, golden[name]["scale"][i])
        close(normalizer.running_low, golden[name]["offset"][i])
    assert normalizer.scale.item() != pytest.approx(golden["debias_true"]["scale"][-1], rel=0.01)


def test_return_normalizer_warms_up_slowly_and_never_amplifies():
    normalizer, scales = dreamer.ReturnNormalizer().double(), {}
    for step in range(1, 301):
        normalizer.update(
            torch.linspace(-100 / 18, 100 + 100 / 18, 1001, dtype=torch.float64)
        )  # p5 = 0, p95 = 100
        scales[step] = normalizer.scale.item()
    assert [scales[n] for n in (1, 10, 100, 300)] == pytest.approx(
        [1.0, 9.56, 63.4, 95.1], rel=1e-3
    )
    small = dreamer.ReturnNormalizer(rate=1.0)
    small.update(torch.linspace(0, 0.3, 100))
    assert small.scale == 1.0
    exact = dreamer.ReturnNormalizer(rate=1.0).double()
    exact.update(torch.arange(10, dtype=torch.float64))
    assert (exact.running_low.item(), exact.running_high.item()) == pytest.approx((0.45, 8.55)), (
        "linear interpolation"
    )
    assert set(exact.state_dict()) == {"running_low", "running_high"}, (
        "the percentiles are saved with the agent"
    )


def test_imagination_weights():
    golden = GOLDEN["imag_weights"]
    weights = dreamer.imagination_weights(time_first(golden["con"]).requires_grad_())
    close(weights, time_first(golden["weight_contdisc_true"]))
    assert not weights.requires_grad
    assert not torch.allclose(weights, time_first(golden["weight_contdisc_false"]), atol=1e-3)
    assert not torch.allclose(weights, time_first(golden["shifted_WRONG"]), atol=1e-3)
    assert (dreamer.imagination_weights(array([[0.0], [1.0], [1.0]])) == 0).all(), (
        "a terminal start teaches nothing"
    )


def actor_case(name):
    """The golden trajectory through our functions, up to the loss's arguments."""
    golden = GOLDEN["actor_loss_discrete"]
    case = golden["cases"][name]
    bins = dreamer.twohot_bins(255)
    value_logits, slow_logits = (
        dense_logits(golden["value_logits_sparse"]),
        dense_logits(golden["slow_logits_sparse"]),
    )
    values, slow_values = (
        dreamer.twohot_mean(value_logits, bins),
        dreamer.twohot_mean(slow_logits, bins),
    )
    continues = time_first(golden["con"])
    returns = dreamer.lambda_return(time_first(golden["reward"]), continues, values, golden["lam"])
    weights = dreamer.imagination_weights(continues)
    normalizer = dreamer.ReturnNormalizer(golden["rate"]).double()
    normalizer.running_low.fill_(case["retnorm_lo_before"])
    normalizer.running_high.fill_(case["retnorm_hi_before"])
    stale = normalizer.scale.clone()
    normalizer.update(returns)
    policy_logits = time_first(golden["policy_logits"]).requires_grad_()
    mixed = dreamer.unimix(policy_logits[:-1], case["policy_unimix"])
    log_probs = mixed.gather(-1, torch.tensor(golden["action"]).T[:-1, :, None]).squeeze(-1)
    entropies = -(mixed.exp() * mixed).sum(-1)
    return dict(
        golden=golden,
        case=case,
        bins=bins,
        values=values,
        slow_values=slow_values,
        returns=returns,
        weights=weights,
        normalizer=normalizer,
        stale=stale,
        policy_logits=policy_logits,
        log_probs=log_probs,
        entropies=entropies,
        value_logits=value_logits,
    )


@pytest.mark.parametrize("name", list(GOLDEN["actor_loss_discrete"]["cases"]))
def test_actor_and_critic_loss(name):
    x = actor_case(name)
    case, weights = x["case"], x["weights"][:-1]
    close(x["values"], time_first(x["golden"]["value_pred"]), rtol=1e-6)
    close(x["slow_values"], time_first(x["golden"]["slow_pred"]), rtol=1e-6)
    close(x["returns"], time_first(case["ret"]), rtol=1e-6)
    close(x["normalizer"].scale, case["ret_scale"], rtol=1e-6)
    close(x["normalizer"].running_high, case["retnorm_hi_after"], rtol=1e-6)
    close(x["log_probs"].detach(), time_first(case["logpi"]))
    close(x["entropies"].detach(), time_first(case["entropy"]))
    close(
        ((x["returns"] - x["values"][:-1]) / x["normalizer"].scale),
        time_first(case["adv"]),
        rtol=1e-6,
        atol=1e-6,
    )
    common = (x["returns"], x["values"][:-1])
    loss = dreamer.actor_loss(
        x["log_probs"],
        x["entropies"],
        *common,
        x["normalizer"].scale,
        weights,
        x["golden"]["actent"],
    )
    close(loss.detach(), case["policy_loss_mean"], rtol=1e-6)
    (grad,) = torch.autograd.grad(loss, x["policy_logits"], retain_graph=True)
    close(grad, time_first(case["grad_logits_of_mean"]), rtol=1e-5, atol=1e-7)
    critic = dreamer.critic_loss(
        x["value_logits"][:-1], x["returns"], x["slow_values"][:-1], weights, x["bins"]
    )
    close(critic, case["value_loss_mean"], rtol=1e-6)


@pytest.mark.parametrize("name", list(GOLDEN["actor_loss_discrete"]["cases"]))
def test_wrong_actor_losses_are_told_apart(name):
    """Each mistake gives exactly the golden file's wrong number: a right one is no accident."""
    x = actor_case(name)
    case, scale, weights, coef = (
        x["case"],
        x["normalizer"].scale,
        x["weights"][:-1],
        x["golden"]["actent"],
    )
    returns, values, log_probs, entropies = (
        x["returns"],
        x["values"][:-1],
        x["log_probs"].detach(),
        x["entropies"].detach(),
    )
    ones, zeros = torch.ones_like(weights), torch.zeros_like(values)
    shifted = torch.cat([ones[:1], weights[:-1]])

    def loss(values=values, scale=scale, weights=weights, returns=returns, coef=coef):
        return dreamer.actor_loss(
            log_probs, entropies, returns, values, scale, weights, coef
        ).item()

    wrong = {
        "no_retnorm_mean": loss(scale=1.0),
        "no_baseline_mean": loss(values=zeros),
        "returns_minus_offset_no_baseline_mean": loss(
            values=zeros, returns=returns - x["normalizer"].running_low
        ),
        "entropy_not_weighted_mean": loss(coef=0.0) - coef * entropies.mean().item(),
        "weights_shifted_by_one_mean": loss(weights=shifted),
        "unweighted_mean": loss(weights=ones),
        "stale_scale_before_update_mean": loss(scale=x["stale"]),
    }
    right = loss()
    assert wrong.keys() == case["WRONG"].keys()
    for mistake, value in wrong.items():
        assert value == pytest.approx(case["WRONG"][mistake], rel=1e-6), mistake
        if name != "scale_limited_to_1" or mistake not in (
            "no_retnorm_mean",
            "stale_scale_before_update_mean",
        ):
            assert abs(value - right) > 5e-5, mistake
    literal = dreamer.actor_loss(
        log_probs, entropies, returns, values, scale, weights, coef, "return-only"
    ).item()
    assert literal == pytest.approx(case["WRONG"]["no_baseline_mean"], rel=1e-6)


def test_actor_loss_continuous():
    golden = GOLDEN["actor_loss_continuous"]
    x = actor_case("scale_above_1")
    policy = dreamer.Policy(4, 4, 1, 2, None, 0.01).double()
    raw = torch.cat(
        [time_first(golden["mean_raw"]), time_first(golden["std_raw"])], -1
    ).requires_grad_()
    policy.net = torch.nn.Identity()
    mean, std = policy.normal(raw)
    close(mean.detach(), time_first(golden["mean"]))
    close(std.detach(), time_first(golden["std"]))
    log_probs, entropies = policy.score(raw, time_first(golden["action"]))
    close(log_probs.detach(), time_first(golden["logpi"]))
    close(entropies.detach(), time_first(golden["entropy"]))
    loss = dreamer.actor_loss(
        log_probs[:-1],
        entropies[:-1],
        x["returns"],
        x["values"][:-1],
        golden["ret_scale"],
        x["weights"][:-1],
        3e-4,
    )
    close(loss.detach(), golden["policy_loss_mean"], rtol=1e-6)
    loss.backward()
    close(raw.grad[..., :2], time_first(golden["grad_mean_raw_float32"]), rtol=0, atol=2e-6)
    close(raw.grad[..., 2:], time_first(golden["grad_std_raw_float32"]), rtol=0, atol=2e-6)


def test_replay_critic_loss():
    golden = GOLDEN["replay_value_loss"]
    x = actor_case("scale_above_1")
    last, term, reward, boot = (
        time_first(golden[k]) for k in ("is_last", "is_terminal", "reward", "boot")
    )
    returns = dreamer.lambda_return(
        reward, golden["disc"] * (1 - term), boot, golden["lam"] * (1 - last)
    )
    close(returns, time_first(golden["ret"]), rtol=1e-6)
    loss = dreamer.replay_critic_loss(
        x["value_logits"],
        reward,
        term,
        last,
        boot,
        x["slow_values"],
        golden["disc"],
        golden["lam"],
        x["bins"],
    )
    close(loss, time_first(golden["loss"])[: len(returns)].mean(), rtol=1e-6)


def test_replay_critic_loss_cuts_the_chain_at_a_time_limit():
    """In the golden case every end inside the window is a termination, which hides this."""
    torch.manual_seed(0)
    T, gamma, lam, bins = 5, 0.9, 0.95, dreamer.twohot_bins(255)
    reward, boot, slow = torch.randn(3, T, 1, dtype=torch.float64)
    logits = torch.randn(T, 1, 255, dtype=torch.float64)
    term = torch.zeros(T, 1, dtype=torch.float64)
    last = array([0, 0, 1, 0, 0])[:, None]
    returns = boot.clone()
    for t in (3, 2, 1, 0):
        future = boot[t + 1] if t + 1 == 2 else (1 - lam) * boot[t + 1] + lam * returns[t + 1]
        returns[t] = reward[t + 1] + gamma * future
    kept = [0, 1, 3]  # from the last state of an episode no return is learned
    expected = sum(
        dreamer.twohot_loss(logits[kept], target[kept], bins) for target in (returns, slow)
    ).sum() / (T - 1)
    loss = dreamer.replay_critic_loss(logits, reward, term, last, boot, slow, gamma, lam, bins)
    close(loss, expected, rtol=1e-9)


def test_continue_loss():
    golden = GOLDEN["continue_head"]
    targets = zip(golden["logit"], golden["target"], golden["loss"])
    for logit, target, expected in targets:
        gamma = target or 1 - 1 / 333
        close(dreamer.continue_loss(array(logit), array(float(target == 0)), gamma), expected)
    logit = torch.tensor(math.log(332.0), dtype=torch.float64, requires_grad=True)
    dreamer.continue_loss(logit, array(0.0), 1 - 1 / 333).backward()
    assert abs(logit.grad.item()) < 1e-9, "the optimum for a state that goes on is log 332"


def test_reconstruction_gru_norm_squash_slow():
    golden = GOLDEN["symlog_mse"]
    close(
        (array(golden["pred"]) - dreamer.symlog(array(golden["target"]))).square().sum(-1),
        golden["loss"],
    )
    golden = GOLDEN["gru_gates"]
    close(
        dreamer.gru_update(*(array(golden[k]) for k in ("reset", "cand", "update", "deter"))),
        golden["deter_new"],
    )
    golden = GOLDEN["rmsnorm"]
    close(dreamer.norm_silu(5).double()[0](array(golden["x"])).detach(), golden["y"])
    golden = GOLDEN["action_squash_in_rssm"]
    action = array(golden["a"]).requires_grad_()
    squashed = dreamer.squash_action(action)
    close(squashed.detach(), golden["out"])
    squashed.sum().backward()
    close(action.grad, 1 / action.detach().abs().clamp(min=1))
    golden = GOLDEN["slow_target"]
    slow = [array(golden["slow"])]
    torch._foreach_lerp_(slow, [array(golden["fast"])], 0.02)
    close(slow[0], golden["new"])


@pytest.mark.parametrize("name", ["warmup1000_lr4e-5", "warmup2_lr0.01"])
def test_laprop_with_adaptive_clipping(name):
    golden = GOLDEN["optimizer_laprop_agc"]
    params = {k: array(v).requires_grad_() for k, v in golden["params"].items()}
    schedule = dreamer.Args(
        learning_rate=golden[name]["lr"], warmup=golden[name]["warmup"], final_lr_fraction=1.0
    )
    optimizer = dreamer.LaProp(params.values(), golden[name]["lr"])
    for step, (grads, expected) in enumerate(zip(golden["grads"], golden[name]["params_after"])):
        optimizer.param_groups[0]["lr"] = dreamer.learning_rate(schedule, step, 0)
        for k, p in params.items():
            p.grad = array(grads[k])
        optimizer.step()
        for k, p in params.items():
            close(p.detach(), expected[k], rtol=0, atol=1.1e-10)


@pytest.mark.parametrize(
    "anneal_steps, steps, shares",
    [(0, (0, 500, 1000), (1, 0.55, 0.1)), (400, (0, 200, 400, 1000), (1, 0.55, 0.1, 0.1))],
)
def test_learning_rate_rises_over_updates_and_falls_over_steps(anneal_steps, steps, shares):
    args = dreamer.Args(
        total_timesteps=1000, anneal_steps=anneal_steps, learning_rate=2e-3, warmup=8,
        final_lr_fraction=0.1,
    )  # fmt: skip
    for step, share in zip(steps, shares):
        assert dreamer.learning_rate(args, 8, step) == pytest.approx(2e-3 * share)
        assert dreamer.learning_rate(args, 10_000, step) == pytest.approx(2e-3 * share)
        assert dreamer.learning_rate(args, 2, step) == pytest.approx(2e-3 * share / 4)
    longer = dataclasses.replace(args, total_timesteps=3000)
    same = dreamer.learning_rate(longer, 8, 200) == dreamer.learning_rate(args, 8, 200)
    assert same == (anneal_steps > 0)  # a longer run then repeats the shorter one


def test_initial_weights():
    torch.manual_seed(0)
    for example in GOLDEN["init"]["examples"]:
        weight = dreamer.linear(example["fan_in"], 4096).weight
        assert weight.std().item() == pytest.approx(example["std"], rel=0.01)
        assert weight.abs().max().item() == pytest.approx(example["abs_max"], rel=0.01)
    block = dreamer.BlockLinear(256, 4096, 8)
    assert block.weight.std().item() == pytest.approx(0.0625, rel=0.01), (
        "fan-in of a block matrix is the full width"
    )
    agent, _ = small_agent()
    feat = torch.randn(7, 16 + 12)
    for head in (agent.reward, agent.value, agent.slow_value):
        assert (dreamer.twohot_mean(head(feat), agent.bins) == 0).all()
    assert agent.policy.net[-1].weight.abs().max() < 0.01


# the question that named the file ----------------------------------------------------------------


@pytest.mark.parametrize(
    "advantage, unbiased",
    [("return-scaled", True), ("return-only", True), ("advantage-scaled", False)],
)
def test_expected_gradient_of_the_advantage_settings(advantage, unbiased):
    """The estimator's exact expectation against autograd of the expected scaled return.

    Two steps, three actions, all nine trajectories; V may be anything that ignores the action.
    """
    torch.manual_seed(3)
    H, scale = 2, 4.0
    logits = torch.randn(
        1 + 3, 3, dtype=torch.float64, requires_grad=True
    )  # state 0, then one state per first action
    rewards = torch.randn(3, 3, dtype=torch.float64) * 5
    baseline = torch.randn(4, dtype=torch.float64)
    log_pi = logits.log_softmax(-1)
    expected_return, estimator = 0.0, torch.zeros_like(logits)
    for first, second in itertools.product(range(3), range(3)):
        state = 1 + first
        total = rewards[0, first] + rewards[1, second] * (1 + first)
        log_probs = torch.stack([log_pi[0, first], log_pi[state, second]])[:, None]
        probability = log_probs.sum().exp()
        expected_return = expected_return + probability * total / scale
        returns = torch.stack([total, rewards[1, second] * (1 + first)])[:, None]
        values = torch.stack([baseline[0], baseline[state]])[:, None]
        weights, zero = (
            torch.ones(H, 1, dtype=torch.float64),
            torch.zeros(H, 1, dtype=torch.float64),
        )
        loss = H * dreamer.actor_loss(
            log_probs, zero, returns, values, scale, weights, 0.0, advantage
        )
        (grad,) = torch.autograd.grad(-loss, logits, retain_graph=True)
        estimator += probability.detach() * grad
    (exact,) = torch.autograd.grad(expected_return, logits)
    assert torch.allclose(estimator, exact, atol=1e-12) == unbiased
    if not unbiased:  # not even in direction
        assert F.cosine_similarity(estimator.flatten(), exact.flatten(), 0) < 1 - 1e-5


def test_baseline_lowers_the_variance():
    torch.manual_seed(0)
    logits = torch.zeros(2, requires_grad=True)
    log_pi, norms = logits.log_softmax(-1), {}
    returns = torch.tensor([10.0, 11.0])
    for advantage in ("return-scaled", "return-only"):
        grads = []
        for action in (0, 1):
            shape = (
                log_pi[action].view(1, 1),
                torch.zeros(1, 1),
                returns[action].view(1, 1),
                torch.full((1, 1), 10.5),
            )
            loss = dreamer.actor_loss(*shape, 1.0, torch.ones(1, 1), 0.0, advantage)
            grads.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
        norms[advantage] = torch.stack(grads).std(0).sum().item()
    assert norms["return-scaled"] < norms["return-only"] / 10


def test_scale_keeps_the_balance_with_the_entropy_for_any_reward_size():
    """Rewards times 1000 leave the gradient as it is; small returns are not blown up."""
    torch.manual_seed(0)
    sizes = {}
    for factor in (1e-3, 10, 1e4):
        returns, values = factor * torch.randn(15, 64), torch.zeros(15, 64)
        normalizer = dreamer.ReturnNormalizer(rate=1.0)
        normalizer.update(returns)
        log_probs = torch.zeros(15, 64, requires_grad=True)
        dreamer.actor_loss(
            log_probs, values, returns, values, normalizer.scale, torch.ones(15, 64), 0.0
        ).backward()
        sizes[factor] = log_probs.grad.norm().item()
    assert sizes[1e4] == pytest.approx(sizes[10], rel=0.01)
    assert sizes[1e-3] < sizes[10] / 100


def test_entropy_bonus_raises_entropy_and_counts_once():
    logits = torch.tensor([[[2.0, 0.0, -1.0]]], requires_grad=True)
    zero, weights = torch.zeros(1, 1), torch.full((1, 1), 0.7)

    def loss(coef):
        log_pi = logits.log_softmax(-1)
        entropy = -(log_pi.exp() * log_pi).sum(-1)
        return dreamer.actor_loss(log_pi[..., 0], entropy, zero, zero, 1.0, weights, coef), entropy

    value, entropy = loss(0.1)
    (grad,) = torch.autograd.grad(value, logits, retain_graph=True)
    step = torch.distributions.Categorical(logits=logits.detach() - grad).entropy()
    assert step > entropy
    assert ((loss(1.1)[0] - value) / 1.0).item() == pytest.approx(
        -(weights * entropy).mean().item(), rel=1e-5
    )


# gradient routing --------------------------------------------------------------------------------


def touched(agent):
    """Top-level parts with a non-zero gradient."""
    return {
        name.split(".")[0]
        for name, p in agent.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0
    }


def losses_for_routing(**options):
    agent, args = small_agent(**options)
    for head in (agent.reward, agent.value):  # zero output layers would hide a leak
        torch.nn.init.normal_(head[-1].weight, std=0.1)
    agent.slow_value.load_state_dict(agent.value.state_dict())
    batch, _ = filled_replay(agent).sample(args.batch_size, args.batch_length)
    loss, feat, deter, stoch, _ = dreamer.world_model_loss(agent, batch, args)
    behaviour, metrics = dreamer.behaviour_loss(
        agent, feat, deter, stoch, batch, args, measure=True
    )
    return agent, loss, behaviour, metrics


def test_each_loss_reaches_its_own_parameters():
    world = {"encoder", "rssm"}
    expected = {
        "world/reconstruction": world | {"decoder"},
        "world/reward": world | {"reward"},
        "world/continue": world | {"cont"},
        "world/dyn": {"rssm"},
        "actor/loss": {"policy"},
        "critic/loss": {"value"},
        "critic/replay_loss": world | {"value"},
    }
    for name, parts in expected.items():
        agent, args = small_agent(free_nats=0.0)
        for head in (agent.reward, agent.value):
            torch.nn.init.normal_(head[-1].weight, std=0.1)
        batch, _ = filled_replay(agent).sample(args.batch_size, args.batch_length)
        _, feat, deter, stoch, model_metrics = dreamer.world_model_loss(agent, batch, args)
        _, metrics = dreamer.behaviour_loss(agent, feat, deter, stoch, batch, args)
        (model_metrics | metrics)[name].backward()
        if (
            name == "world/dyn"
        ):  # through deter the prior sees the encoder too; the posterior's own layers get nothing
            assert (
                touched(agent) == {"rssm", "encoder"}
                and agent.rssm.prior[0].weight.grad.abs().sum() > 0
            )
        else:
            assert touched(agent) == parts, name
        assert all(p.grad is None for p in agent.slow_value.parameters())


def test_one_backward_trains_everything_and_gradient_norms_are_reported():
    agent, loss, behaviour, metrics = losses_for_routing()
    (loss + behaviour).backward()
    assert all(
        p.grad is not None
        for name, p in agent.named_parameters()
        if not name.startswith("slow_value")
    )
    assert metrics["actor/policy_grad_norm"] > 0 and metrics["actor/entropy_grad_norm"] > 0


def test_the_weights_of_the_world_models_losses():
    """Each of the options weighs its own loss, and the sum is what is minimised."""
    agent, args = small_agent(free_nats=0.0)
    batch, _ = filled_replay(agent).sample(args.batch_size, args.batch_length)
    weights = {"rec_scale": "reconstruction", "dyn_scale": "dyn", "rep_scale": "rep"}

    def losses(**options):
        torch.manual_seed(0)
        options = small_args(free_nats=0.0, **options)
        loss, _, _, _, metrics = dreamer.world_model_loss(agent, batch, options)
        assert loss.item() == pytest.approx(sum(metrics.values()).item(), rel=1e-5)
        return {key.removeprefix("world/"): value.item() for key, value in metrics.items()}

    plain = losses(rec_scale=1.0, dyn_scale=1.0, rep_scale=1.0)
    assert plain["reconstruction"] > 0 and plain["dyn"] == pytest.approx(plain["rep"], rel=1e-4)
    assert losses() == pytest.approx({**plain, "rep": 0.1 * plain["rep"]}, rel=1e-5)  # official
    for option, name in weights.items():
        scaled = losses(**dict.fromkeys(weights, 1.0) | {option: 3.0})
        assert scaled == pytest.approx({**plain, name: 3 * plain[name]}, rel=1e-5)


def test_imagination_starts_from_every_replayed_state(monkeypatch):
    agent, args = small_agent()
    seen = []
    original = dreamer.imagine
    monkeypatch.setattr(dreamer, "imagine", lambda *a: seen.append(a[1].shape) or original(*a))
    for last, count in ((0, 18), (2, 6)):
        batch, _ = filled_replay(agent).sample(args.batch_size, args.batch_length)
        options = small_args(imag_last=last)
        _, feat, deter, stoch, _ = dreamer.world_model_loss(agent, batch, options)
        dreamer.behaviour_loss(agent, feat, deter, stoch, batch, options)
        assert seen[-1][0] == count


def test_imagination_acts_in_each_state_and_keeps_all_of_them():
    """With a policy and a model that compute, every state and action follows from the one before"""
    agent, _ = small_agent()
    agent.policy.act = lambda feat: feat[:, :3].cos()
    agent.rssm.imagine_step = lambda deter, stoch, action: (deter + action.sum(), stoch * 0.5 + 1)
    deter, stoch = (torch.randn(5, size) for size in agent.rssm.sizes)
    feats, actions = dreamer.imagine(agent, deter, stoch, 4)
    assert feats.shape == (5, 5, deter.shape[1] + stoch.shape[1]) and actions.shape == (4, 5, 3)
    for t in range(5):
        close(feats[t], torch.cat([deter, stoch], -1))
        if t < 4:
            close(actions[t], feats[t, :, :3].cos())
            deter, stoch = deter + actions[t].sum(), stoch * 0.5 + 1


def test_latent_samples_are_mixed_with_the_uniform():
    """However sure the logits are, 1% is spread over all K classes."""
    torch.manual_seed(0)
    rssm = small_agent()[0].rssm
    logits = torch.zeros(20_000, rssm.classes, rssm.stoch)
    logits[:, 0] = 30.0
    sample = rssm.sample(logits.flatten(-2)).view_as(logits)
    other = 0.01 * (rssm.classes - 1) / rssm.classes
    assert sample[:, 1:].sum(1).mean().item() == pytest.approx(other, rel=0.15)


def test_straight_through():
    logits = torch.zeros(3, requires_grad=True)
    sample = dreamer.straight_through(logits.softmax(-1))
    assert sorted(sample.tolist()) == pytest.approx([0, 0, 1])
    (sample * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    close(logits.grad, [-1 / 3, 0, 1 / 3], atol=1e-6)


def test_samples_have_the_right_frequencies():
    torch.manual_seed(0)
    probs = torch.tensor([0.1, 0.2, 0.0, 0.7]).expand(100_000, 4)
    samples = dreamer.sample_onehot(probs)
    assert (samples.sum(-1) == 1).all() and ((samples == 0) | (samples == 1)).all()
    close(samples.mean(0), [0.1, 0.2, 0.0, 0.7], rtol=0, atol=0.006)
    assert dreamer.sample_onehot(torch.zeros(10, 3)).sum(-1).eq(1).all(), (
        "always one class, whatever rounding does"
    )


# latent state, replay ----------------------------------------------------------------------------


def test_is_first_forgets_state_and_previous_action():
    agent, _ = small_agent()
    tokens, T, N = torch.randn(1, 5, 8), 1, 5

    def step(deter, stoch, action, first):
        torch.manual_seed(1)
        return agent.rssm.observe(tokens, action[None], first.expand(T, N), deter, stoch)

    one, other = (
        (torch.randn(N, 16), torch.randn(N, 12), torch.eye(3)[[i, 0, 1, 2, i]]) for i in (1, 2)
    )
    zero = (torch.zeros(N, 16), torch.zeros(N, 12), torch.zeros(N, 3))
    for a, b, c in zip(
        step(*one, torch.ones(1)), step(*other, torch.ones(1)), step(*zero, torch.zeros(1))
    ):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert not torch.equal(step(*one, torch.zeros(1))[0], step(*other, torch.zeros(1))[0])
    assert not torch.equal(
        step(one[0], one[1], other[2], torch.zeros(1))[0], step(*one, torch.zeros(1))[0]
    ), "without is_first the previous action counts"


def test_acting_and_replaying_agree():
    """Acting meets the states that a replay of the same records computes (sampling aside)."""
    agent, _ = small_agent()
    agent.rssm.sample = lambda logits: logits.softmax(-1)
    obs, is_first = torch.randn(6, 2, 2), torch.tensor([1.0, 0, 0, 1, 0, 0])[:, None].expand(6, 2)
    state, actions, deters = agent.initial(2), [torch.zeros(2, 3)], []
    for t in range(6):
        action, state = agent.act(obs[t], state, is_first[t])
        actions.append(action)
        deters.append(state[0])
    tokens = agent.encoder(dreamer.symlog(obs))
    deter, _, _ = agent.rssm.observe(
        tokens, torch.stack(actions[:-1]), is_first, *agent.rssm.initial(2)
    )
    close(deter.detach(), torch.stack(deters), rtol=1e-5, atol=1e-6)


def test_replay_windows_stay_in_one_environment_and_off_the_write_head():
    rng, capacity, num_envs, T = np.random.default_rng(0), 150, 3, 7
    replay = dreamer.Replay(capacity, num_envs, 2, 2, 4, 4)
    clock = np.zeros(num_envs)
    for _ in range(500):  # uneven streams: environment 0 writes twice as often
        envs = np.flatnonzero(rng.random(num_envs) < [1.0, 0.5, 0.5])
        first, n = (rng.random(len(envs)) < 0.1).astype(float), len(envs)
        if n == 0:
            continue
        replay.add(
            envs,
            obs=np.stack([envs, clock[envs]], 1),
            reward=clock[envs],
            is_first=first,
            is_last=0 * first,
            is_terminal=0 * first,
            action=np.stack([clock[envs]] * 2, 1),
            deter=np.stack([clock[envs]] * 4, 1),
            stoch=np.zeros((n, 4)),
        )
        clock[envs] += 1
    seen = set()
    for _ in range(600):
        batch, _ = replay.sample(17, T)
        tag, step = batch["obs"].unbind(-1)
        assert (tag == tag[0]).all() and (step[1:] - step[:-1] == 1).all()
        assert (batch["prev_action"][..., 0] == step - 1).all(), (
            "the action before each observation"
        )
        assert (batch["deter"][..., 0] == step[0] - 1).all(), (
            "the state before the first trained record"
        )
        assert (batch["is_last"][:-1] >= batch["is_first"][1:]).all(), (
            "an abandoned episode ends where the next starts"
        )
        seen |= set(zip(tag[0].tolist(), step[0].tolist()))
    length = capacity // num_envs
    for env in range(num_envs):  # every window is met, the newest and the oldest included
        starts = {int(s) for e, s in seen if e == env}
        assert starts == set(range(int(clock[env]) - length + 1, int(clock[env]) - T + 1))


def test_fresh_sequences_come_once_before_random_ones():
    agent, _ = small_agent()
    replay = filled_replay(agent, num_envs=2, steps=28)
    env, first = replay.starts(5, 6)
    assert list(zip(env[:5], first[:5])) == [(0, 0), (0, 7), (0, 14), (0, 21), (1, 0)]
    env, first = replay.starts(5, 6)
    assert list(zip(env[:3], first[:3])) == [(1, 7), (1, 14), (1, 21)] and not replay.fresh


def test_latents_are_written_back_to_the_replay_itself():
    agent, args = small_agent()
    replay = filled_replay(agent)
    before = replay.data["deter"].clone()
    optimizer = dreamer.LaProp([p for p in agent.parameters() if p.requires_grad], 1e-3)
    dreamer.train_step(agent, optimizer, replay, args)
    changed = (replay.data["deter"] != before).any(-1)
    assert 6 <= changed.sum() <= 18
    assert (replay.data["stoch"][changed].view(-1, 4, 3).sum(1) == 1).all(), "one class per latent"


def test_memory_is_flat():
    replay = dreamer.Replay(100, 2, 3, 2, 4, 4)
    sizes = [replay.num_bytes]
    for _ in range(500):
        ones = {k: np.ones((2, *v.shape[2:])) for k, v in replay.data.items()}
        replay.add(np.arange(2), **ones)
        replay.num_windows(5).sum() and replay.starts(4, 5)
        sizes.append(replay.num_bytes)
    assert len(set(sizes)) == 1 and len(replay.fresh) < 50


def test_copied_action_is_reconstructed():
    """obs_{t+1} = action_t, at random: only the right pairing predicts what comes next."""
    torch.manual_seed(0)
    args = dreamer.Args(
        deter=32,
        hidden=32,
        stoch=4,
        classes=4,
        units=32,
        layers=1,
        num_bins=15,
        batch_size=8,
        batch_length=8,
        horizon=1,
    )
    agent = dreamer.Dreamer(3, 3, (3,), args)
    replay, rng = dreamer.Replay(2000, 1, 3, 3, 32, 16), np.random.default_rng(0)
    action = np.zeros((1, 3))
    for step in range(1500):
        obs, action = action, np.eye(3)[rng.integers(3, size=1)]
        flag = np.zeros(1)
        replay.add(
            np.zeros(1, int),
            obs=obs,
            reward=flag,
            is_first=flag + (step == 0),
            is_last=flag,
            is_terminal=flag,
            action=action,
            deter=np.zeros((1, 32)),
            stoch=np.zeros((1, 16)),
        )
    optimizer = dreamer.LaProp([p for p in agent.parameters() if p.requires_grad], 3e-3)
    for _ in range(250):
        batch, _ = replay.sample(8, 8)
        loss, _, deter, stoch, _ = dreamer.world_model_loss(agent, batch, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():  # open loop: the observation of the next step from the action alone
        batch, _ = replay.sample(64, 8)
        _, _, deter, stoch, _ = dreamer.world_model_loss(agent, batch, args)
        deter, stoch = agent.rssm.imagine_step(deter[-2], stoch[-2], batch["prev_action"][-1])
        predicted = agent.decoder(torch.cat([deter, stoch], -1))
        error = (predicted - dreamer.symlog(batch["obs"][-1])).square().sum(-1).mean()
    assert error < 0.1, "0.32 is what a guess at the mean reaches"


# acting, environments, whole runs ----------------------------------------------------------------


def tiny_run(tmp_path, **options):
    """Arguments of a run of seconds."""
    sizes = {"deter": 32, "hidden": 32, "stoch": 4, "classes": 4, "units": 32, "layers": 1}
    batch = {"batch_size": 8, "batch_length": 8, "horizon": 5, "num_bins": 41, "train_ratio": 64}
    run = {"runs_dir": str(tmp_path), "wandb_mode": "disabled", "eval_episodes": 10, "warmup": 20}
    schedule = {"total_timesteps": 400, "learning_starts": 100, "log_every": 50, "save_every": 1}
    return dreamer.Args(**(sizes | batch | run | schedule | {"learning_rate": 3e-3} | options))


def trained(args):
    """Summary and agent of a finished run."""
    summary = dreamer.train(args)
    (path,) = Path(args.runs_dir).glob("*/last.pt")
    agent = dreamer.build_agent(args)
    agent.load_state_dict(dreamer.load_checkpoint(path)["agent"])
    return summary, agent


def value_of(agent, *observations):
    """The critic's value after the last of these observations, averaged over posterior samples."""
    torch.manual_seed(0)
    state, is_first = agent.initial(50), np.ones(50)
    for obs in observations:
        _, state = agent.act(np.full((50, 1), obs), state, is_first, True)
        is_first = np.zeros(50)
    return dreamer.twohot_mean(agent.value(torch.cat(state[:2], -1)), agent.bins).mean().item()


GAMMA = 1 - 1 / 333


@pytest.mark.parametrize(
    "probe, values",
    [
        ("ConstantValue", {(0,): 1.0}),
        ("ObsValue", {(-1,): -1.0, (1,): 1.0}),
        ("TwoSteps", {(0,): GAMMA, (0, 1): 1.0}),
    ],
)
def test_probe_values(tmp_path, probe, values):
    args = tiny_run(tmp_path, env_id=f"tests.probes:{probe}-v0")
    _, agent = trained(args)
    for observations, value in values.items():
        assert value_of(agent, *observations) == pytest.approx(value, abs=0.2)


@pytest.mark.parametrize("probe", ["BestAction", "ObsAction"])
def test_probe_actions(tmp_path, probe):
    options = {"total_timesteps": 600, "train_ratio": 128}
    args = tiny_run(tmp_path, env_id=f"tests.probes:{probe}-v0", **options)
    assert dreamer.train(args)["eval_return_mean"] == 1.0


def counting_actor(env_id, num_envs=1, action_repeat=1):
    envs = dreamer.make_envs(env_id, num_envs, action_repeat)
    spec = dreamer.ActionSpec(envs.single_action_space)
    agent, _ = small_agent(obs_dim=1, nvec=spec.nvec, action_dim=spec.dim)
    replay = dreamer.Replay(4000, num_envs, 1, spec.dim, *agent.rssm.sizes)
    return dreamer.Actor(envs, spec, agent, [1, 0, 0]), replay


@pytest.mark.parametrize("env_id, terminal", [("Count-v0", 1.0), ("CountTimeLimit-v0", 0.0)])
def test_records_of_episodes(env_id, terminal):
    """An episode of 3 steps is 4 records, the last with its true observation and reward."""
    actor, replay = counting_actor(f"tests.probes:{env_id}")
    episodes = [episode for _ in range(9) for episode in actor.step(replay)]
    assert episodes == [(3.0, 3)] * 3, "returns and lengths start again after each episode"
    records = {name: value[0, :12] for name, value in replay.data.items()}
    assert records["obs"][:, 0].tolist() == [0, 1, 2, 3] * 3
    assert records["reward"].tolist() == [0, 1, 1, 1] * 3
    assert records["is_first"].tolist() == [1, 0, 0, 0] * 3
    assert records["is_last"].tolist() == [0, 0, 0, 1] * 3
    assert records["is_terminal"].tolist() == [0, 0, 0, terminal] * 3
    assert records["action"].sum(-1).tolist() == [1, 1, 1, 0] * 3
    loss = dreamer.continue_loss(torch.full((12,), 20.0), records["is_terminal"], GAMMA)
    assert (loss[3::4] > 10).all() == bool(terminal), "only a termination teaches an end"


def test_repeated_actions():
    """Steps of the agent are records; returns, lengths and global_step count the environment's."""
    actor, replay = counting_actor("tests.probes:Count-v0", action_repeat=2)
    episodes = [episode for _ in range(6) for episode in actor.step(replay)]
    assert episodes == [(3.0, 3)] * 3
    records = {name: value[0, :9] for name, value in replay.data.items()}
    assert records["obs"][:, 0].tolist() == [0, 2, 3] * 3, "an end cuts the repetition short"
    assert records["reward"].tolist() == [0, 2, 1] * 3, "rewards add up"
    assert records["is_first"].tolist() == [1, 0, 0] * 3
    assert records["is_last"].tolist() == records["is_terminal"].tolist() == [0, 0, 1] * 3
    actor, _ = counting_actor("tests.probes:CountTimeLimit-v0", action_repeat=2)
    assert actor.step() == [] and actor.step() == [(3.0, 3)], "a time limit ends it too"


def test_repeated_actions_in_evaluation(tmp_path):
    args = tiny_run(tmp_path, env_id="tests.probes:Count-v0", action_repeat=3)
    agent, asked = dreamer.build_agent(args), []
    act = agent.act
    agent.act = lambda *args: asked.append(1) or act(*args)
    returns, lengths = dreamer.evaluate(agent, args, 5)
    assert (returns == 3).all() and (lengths == 3).all() and len(asked) == 1


def test_the_gif_is_one_episode_that_the_agent_remembers(monkeypatch, tmp_path):
    """Every choice but the first one builds on the state that the one before has left."""
    args = tiny_run(tmp_path, env_id="tests.probes:Count-v0", action_repeat=2)
    agent, asked = dreamer.build_agent(args), []
    act = agent.act

    def remember(obs, state, is_first, deterministic):
        action, new = act(obs, state, is_first, deterministic)
        asked.append((obs.tolist(), state, is_first.tolist(), new))
        return action, new

    def record_gif(env_id, seed, play, path):
        asked.clear()  # the evaluation's
        for step in range(6):
            play(np.array([step], np.float32))

    monkeypatch.setattr(agent, "act", remember)
    monkeypatch.setattr(dreamer, "record_gif", record_gif)
    dreamer.evaluate_and_record(agent, args, tmp_path / "episode.gif")
    observations, states, firsts, left = zip(*asked)
    assert observations == ([[0.0]], [[2.0]], [[4.0]]) and firsts == ([1], [0], [0])
    assert states[1] is left[0] and states[2] is left[1]


def test_repeated_actions_in_training(monkeypatch, tmp_path):
    """One update per 2 steps of the agent, 6 of the environment; the GIF keeps actions as well."""
    updates, shown = [], []
    original, record = dreamer.train_step, dreamer.record_gif
    monkeypatch.setattr(
        dreamer, "train_step", lambda *args, **kw: updates.append(1) or original(*args, **kw)
    )

    def record_gif(env_id, seed, act, path):
        record(env_id, seed, lambda obs: shown.append(act(obs)) or shown[-1], path)

    monkeypatch.setattr(dreamer, "record_gif", record_gif)
    args = tiny_run(
        tmp_path, env_id="CartPole-v1", total_timesteps=240, learning_starts=60, action_repeat=3,
        train_ratio=0.5 * 4 * 8, batch_size=4, batch_length=8, deterministic=False,
    )
    summary = dreamer.train(args)
    assert summary["global_step"] == 240
    assert len(updates) == pytest.approx((240 - 60) / 3 / 2, abs=1)
    assert len(shown) > 6
    blocks = [set(shown[i : i + 3]) for i in range(0, len(shown), 3)]
    assert all(len(block) == 1 for block in blocks) and len(set.union(*blocks)) == 2


def test_environments_start_differently_and_reproducibly():
    def first_rows(words):
        envs = dreamer.make_envs("CartPole-v1", 3, 1)
        spec = dreamer.ActionSpec(envs.single_action_space)
        agent, _ = small_agent(4, spec.nvec, spec.dim)
        return dreamer.Actor(envs, spec, agent, words).obs

    rows = first_rows([1, 0, 0])
    assert len(np.unique(rows, axis=0)) == 3
    assert (rows == first_rows([1, 0, 0])).all() and not (rows == first_rows([2, 0, 0])).any()


def test_action_spaces():
    spaces = gym.spaces
    spec = dreamer.ActionSpec(spaces.Discrete(3, start=5))
    assert spec.to_env(torch.eye(3)).tolist() == [5, 6, 7] and spec.dim == 3
    spec = dreamer.ActionSpec(spaces.MultiDiscrete([3, 2]))
    chosen = torch.tensor([[0.0, 0, 1, 1, 0], [1, 0, 0, 0, 1]])
    assert spec.to_env(chosen).tolist() == [[2, 0], [0, 1]] and spec.dim == 5
    spec = dreamer.ActionSpec(
        spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
    )
    assert spec.to_env(torch.tensor([[-3.0, 0.0], [0.5, 9.0]])).tolist() == [[-2, 0.5], [1, 1]]
    with pytest.raises(dreamer.UsageError, match="MultiBinary"):
        dreamer.ActionSpec(spaces.MultiBinary(3))


def test_several_discrete_actions_are_summed():
    agent, _ = small_agent(nvec=(3, 2), action_dim=5)
    feat = torch.randn(7, 28)
    action = agent.policy.act(feat)
    assert (action[:, :3].sum(-1) == 1).all() and (action[:, 3:].sum(-1) == 1).all()
    log_prob, entropy = agent.policy.score(feat, action)
    parts = agent.policy.categoricals(feat)
    expected = parts[0][action[:, :3].bool()] + parts[1][action[:, 3:].bool()]
    close(log_prob.detach(), expected.detach(), rtol=1e-5)
    assert log_prob.shape == entropy.shape == (7,)


def test_out_of_range_actions_are_scored_as_drawn(tmp_path):
    """Pendulum: the replay holds the raw sample, the environment gets the clipped one."""
    envs = dreamer.make_envs("Pendulum-v1", 2, 1)
    spec = dreamer.ActionSpec(envs.single_action_space)
    agent, _ = small_agent(3, spec.nvec, spec.dim)
    agent.policy.act = lambda feat, greedy: torch.full((2, 1), 3.0)
    replay = dreamer.Replay(100, 2, 3, 1, *agent.rssm.sizes)
    actor = dreamer.Actor(envs, spec, agent, [1, 0, 0])
    actor.step(replay)
    assert (replay.data["action"][:, 0] == 3.0).all()
    assert (spec.to_env(torch.full((2, 1), 3.0)) == 2.0).all()


@pytest.mark.parametrize("broken, cause", [("NaNReward", "reward"), ("NaNObs", "observation")])
def test_non_finite_input_stops_the_run(tmp_path, broken, cause):
    args = tiny_run(tmp_path, env_id=f"tests.probes:{broken}-v0")
    with pytest.raises(dreamer.TrainingError, match=f"non-finite {cause}.*environment 0"):
        dreamer.train(args)
    assert not list(tmp_path.glob("*/*.pt"))


def test_non_finite_loss_stops_before_the_weights_change():
    agent, args = small_agent()
    replay = filled_replay(agent)
    replay.data["reward"][:] = math.nan
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    optimizer = dreamer.LaProp([p for p in agent.parameters() if p.requires_grad], 1e-3)
    with pytest.raises(dreamer.TrainingError, match="non-finite world/reward"):
        dreamer.train_step(agent, optimizer, replay, args)
    after = agent.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if "running" not in k)


def test_same_seed_same_weights_and_resume(tmp_path, capsys):
    agents = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        args = tiny_run(
            tmp_path / folder, env_id="tests.probes:TwoSteps-v0", seed=seed, total_timesteps=150
        )
        agents.append(trained(args)[1].state_dict())
    assert all(torch.equal(agents[0][k], agents[1][k]) for k in agents[0])
    assert not all(torch.equal(agents[0][k], agents[2][k]) for k in agents[0])
    (last,) = (tmp_path / "a").glob("*/last.pt")
    saved = dreamer.load_checkpoint(last)
    assert saved["agent"]["return_normalizer.running_high"] > 0 and saved["num_updates"] == 50
    longer = tiny_run(
        tmp_path / "a", env_id="tests.probes:TwoSteps-v0", total_timesteps=300, resume=str(last)
    )
    capsys.readouterr()
    dreamer.train(longer)
    assert "replay, which starts empty again" in capsys.readouterr().err
    resumed = dreamer.load_checkpoint(last)
    assert resumed["progress"]["global_step"] == 300
    assert resumed["num_updates"] == 50 + 50, "the empty replay is filled first, without a burst"
    rows = [json.loads(row) for row in (last.parent / "metrics.jsonl").read_text().splitlines()]
    steps = [row["global_step"] for row in rows]
    assert steps == sorted(set(steps))
    rate = dreamer.learning_rate(longer, resumed["num_updates"], 300)
    assert rows[-1]["charts/learning_rate"] == rate
    assert {"actor/policy_grad_norm", "actor/entropy_grad_norm", "actor/grad_ratio"} <= rows[
        -1
    ].keys()


@pytest.mark.parametrize("advantage", ["return-only", "advantage-scaled"])
def test_advantage_settings_run_with_continuous_actions(tmp_path, advantage):
    args = tiny_run(tmp_path, env_id="Pendulum-v1", advantage=advantage, total_timesteps=110)
    assert math.isfinite(dreamer.train(args)["eval_return_mean"])


def test_impossible_arguments_are_refused():
    for options in (
        {"total_timesteps": 100},
        {"deter": 30, "blocks": 4},
        {"num_bins": 64},
        {"replay_capacity": 10},
        {"size": "huge"},
        {"imag_last": 99},
        {"gamma": 1.1},
        {"num_envs": 0},
    ):
        with pytest.raises(dreamer.UsageError):
            dreamer.Args(**options)


def test_official_sizes():
    args = dreamer.Args(size="1m", num_bins=255)
    agent = dreamer.Dreamer(24, 6, None, args)
    trained_parameters = sum(p.numel() for p in agent.parameters() if p.requires_grad)
    assert trained_parameters == pytest.approx(640_867, rel=0.02)  # walker, as counted elsewhere


def test_learns_cartpole(tmp_path):
    """About two minutes. A random policy keeps the pole up for 22 steps, a constant one for 9."""
    args = dreamer.Args(
        env_id="CartPole-v1", total_timesteps=3000, runs_dir=str(tmp_path), wandb_mode="disabled"
    )
    assert dreamer.train(args)["eval_return_mean"] > 195


def test_each_checkpoint_returns_free_memory(monkeypatch, tmp_path):
    """Else gaps between tensors grow to gigabytes in a run of half an hour."""
    saved, returned = [], []
    save = dreamer.Run.save
    monkeypatch.setattr(dreamer.Run, "save", lambda *args: saved.append(1) or save(*args))
    monkeypatch.setattr(dreamer, "return_free_memory", lambda: returned.append(len(saved)))
    dreamer.train(tiny_run(tmp_path, env_id="tests.probes:Count-v0", train_ratio=1))
    assert returned == list(range(1, len(saved) + 1)) and saved
