# What operations of members and plain arrays give.
import unittest

import numpy as np
import pymm
import torch

force_new = True


class TestCasting(unittest.TestCase):
    def setUp(self):
        global force_new
        self.s = pymm.shelf("myShelf", size_mb=1024, pmem_path="/mnt/pmem0", force_new=force_new)
        force_new = False

    def tearDown(self):
        del self.s

    def test_ndarray(self):
        self.s.x = pymm.ndarray((100, 100))
        n = np.ones((100, 100))
        self.assertTrue(str(type(self.s.x)) == "<class 'pymm.ndarray.shelved_ndarray'>")
        self.s.x.fill(1)
        self.assertTrue(str(type(self.s.x)) == "<class 'pymm.ndarray.shelved_ndarray'>")
        for result in (self.s.x * n, n * self.s.x, self.s.x * self.s.x):
            self.assertTrue(str(type(result)) == "<class 'numpy.ndarray'>")
        self.s.erase("x")

    def test_torch_tensor(self):
        self.s.x = pymm.torch_tensor((10,))
        n = torch.Tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
        self.assertTrue(str(type(self.s.x)) == "<class 'pymm.torch_tensor.shelved_torch_tensor'>")
        self.s.x.fill(1)
        self.assertTrue(self.s.x[0] == 1)
        self.assertTrue(str(type(self.s.x)) == "<class 'pymm.torch_tensor.shelved_torch_tensor'>")
        for result in (self.s.x * n, n * self.s.x, self.s.x * self.s.x):
            self.assertTrue(str(type(result)) == "<class 'torch.Tensor'>")
        self.s.x += 1
        self.s.x *= 2
        self.s.x -= 0.4
        self.s.x /= 2
        self.assertTrue(torch.allclose(self.s.x, torch.full((10,), 1.8, dtype=torch.float64)))
        self.s.erase("x")
