# Mean and covariance of a stream of samples, accumulated on the shelf (the experiment of the HPEC paper, made small).
import numpy as np
import pymm


class Posterior:
    def __init__(self, num_params, shelf):
        self.num_samples_seen = 0
        self.shelf = shelf
        self.shelf.posterior_sums = pymm.ndarray((num_params, 1), dtype=np.float64)
        self.shelf.posterior_squaresums = pymm.ndarray((num_params, num_params), dtype=np.float64)
        self.shelf.posterior_sums.fill(0)
        self.shelf.posterior_squaresums.fill(0)

    def update(self, theta):
        theta = theta.reshape(-1, 1)
        self.shelf.posterior_sums += theta
        self.shelf.posterior_squaresums += theta.dot(theta.T)
        self.num_samples_seen += 1

    def finalize(self):
        n = self.num_samples_seen
        self.shelf.posterior_mu = self.shelf.posterior_sums / n
        self.shelf.posterior_cov = (
            self.shelf.posterior_squaresums
            - self.shelf.posterior_mu.dot(self.shelf.posterior_sums.T)
            - self.shelf.posterior_sums.dot(self.shelf.posterior_mu.T)
            + n * self.shelf.posterior_mu.dot(self.shelf.posterior_mu.T)
        ) / (n - 1)
        self.shelf.posterior_cholesky = np.linalg.cholesky(self.shelf.posterior_cov)

    def sample(self, z):
        return self.shelf.posterior_cholesky.dot(z) + self.shelf.posterior_mu


shelf = pymm.shelf("posterior", size_mb=128, pmem_path="/mnt/pmem0", force_new=True)
samples = np.random.default_rng(1).normal(size=(200, 8))
posterior = Posterior(8, shelf)
for sample in samples:
    posterior.update(sample)
posterior.finalize()
assert np.allclose(shelf.posterior_mu[:, 0], samples.mean(axis=0))
assert np.allclose(shelf.posterior_cov, np.cov(samples.T))
assert posterior.sample(np.zeros((8, 1))).shape == (8, 1)
assert type(shelf.posterior_cov * 2) is np.ndarray
