"""Random numbers are functions of their key, uniform, and local to the thread that seeds them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gpuprefetch.transforms.random import SeededDraws, fold, uniform


def test_a_key_gives_the_same_numbers_alone_or_in_a_batch():
    keys = fold(fold(7, 3), np.arange(1000))
    whole = uniform(keys, 5)
    assert np.array_equal(whole[123:124], uniform(keys[123:124], 5))
    assert np.array_equal(whole[:, :2], uniform(keys, 2))


def test_keys_differ_in_every_part():
    keys = {
        int(fold(fold(fold(s, e), [i]), v)[0])
        for s in range(5)
        for e in range(5)
        for i in range(-3, 3)
        for v in range(3)
    }
    assert len(keys) == 5 * 5 * 6 * 3
    assert int(fold(-1, 0)) != int(fold(1, 0))


def test_uniform_in_mean_variance_and_correlation():
    x = uniform(fold(1, np.arange(200_000)), 4)
    assert x.min() >= 0
    assert x.max() < 1
    # Five standard errors of 200,000 draws: 5 * sqrt(1/12) / sqrt(200,000) = 0.0032.
    assert np.allclose(x.mean(axis=0), 0.5, atol=0.0032)
    assert np.allclose(x.var(axis=0), 1 / 12, atol=0.001)
    correlation = np.corrcoef(np.concatenate([x, np.roll(x, 1, axis=0)], axis=1).T)
    assert np.abs(correlation - np.eye(8)).max() < 5 / np.sqrt(200_000)


DRAWS = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "randint": lambda: torch.randint(0, 1000, (3,)),
    "randperm": lambda: torch.randperm(20),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "binomial": lambda: torch.distributions.Binomial(90, torch.full((9,), 0.5)).sample(),
    "multinomial": lambda: torch.multinomial(torch.ones(100), 3),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "randn_like": lambda: torch.randn_like(input=torch.ones(3)),
    "randint_like": lambda: torch.randint_like(torch.ones(3), 1000),
    "randint_like, from": lambda: torch.randint_like(torch.ones(3), 5, 1000),
    "randint_like, by name": lambda: torch.randint_like(torch.ones(3), low=5, high=1000),
    "beta": lambda: torch.distributions.Beta(1.0, 1.0).sample((3,)),
    "uniform": lambda: torch.distributions.Uniform(0.0, 1.0).rsample((3,)),
}


@pytest.mark.parametrize("name", list(DRAWS))
def test_seeded_draws_repeat_and_leave_the_default_generator_alone(name):
    draw = DRAWS[name]
    state = torch.get_rng_state()
    with SeededDraws(1):
        first = draw()
    with SeededDraws(1):
        again = draw()
    with SeededDraws(2):
        other = draw()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeded_draws_are_local_to_their_thread():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    with SeededDraws(1), ThreadPoolExecutor() as pool:
        drawn = pool.submit(torch.rand, 4).result()
    assert torch.equal(drawn, expected)
