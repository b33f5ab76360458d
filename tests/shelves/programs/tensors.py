# Tensors: from lists, arrays and tensors, without axes, summed, sliced, reassigned.
import unittest

import numpy as np
import pymm
import torch

shelf = pymm.shelf("myShelf", size_mb=128, pmem_path="/mnt/pmem0", force_new=True)
SHELVED = "<class 'pymm.torch_tensor.shelved_torch_tensor'>"


class TestTensors(unittest.TestCase):
    def test_shadow(self):
        shelf.x = pymm.torch_tensor([1, 1, 1, 1, 1])
        self.assertEqual(shelf.x.tolist(), [1.0] * 5)
        shelf.y = pymm.torch_tensor(np.arange(0, 10))
        shelf.y.fill(-1.2)
        self.assertEqual(shelf.y.sum(), -12.0)
        shelf.x = pymm.torch_tensor([[1, 1, 1, 1], [2, 2, 2, 2]], dtype=torch.uint8)
        self.assertTrue(torch.equal(shelf.x, torch.tensor([[1, 1, 1, 1], [2, 2, 2, 2]], dtype=torch.uint8)))

    def test_copy(self):
        T = torch.tensor([[1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [3, 3, 3, 3, 3]])
        shelf.x = T
        self.assertTrue(shelf.x.equal(T))
        shelf.x = torch.ones([3, 5], dtype=torch.float64)
        shelf.x += 0.5
        self.assertEqual(shelf.x.sum().item(), 22.5)
        shelf.x = torch.randn(1, 1)
        self.assertTrue(shelf.x.is_leaf)

    def test_zerodim(self):
        shelf.x = pymm.torch_tensor(1.0)
        self.assertTrue(shelf.x.dim() == 0)
        self.assertTrue(str(type(shelf.x)) == SHELVED)
        shelf.y = torch.tensor(2.0)
        self.assertTrue(shelf.y.dim() == 0)
        self.assertTrue(str(type(shelf.y)) == SHELVED)

    def test_sums(self):
        n = torch.Tensor(np.arange(0, 1000))
        shelf.t = torch.Tensor(np.arange(0, 1000))
        self.assertTrue(sum(shelf.t) == 499500)
        self.assertTrue(shelf.t.sum() == 499500)
        self.assertTrue(sum(shelf.t[10:20]) == 145)
        self.assertTrue(str(type(shelf.t)) == SHELVED)
        for result in (shelf.t * n, n * shelf.t, shelf.t * shelf.t):
            self.assertTrue(str(type(result)) == "<class 'torch.Tensor'>")
        shelf.erase("t")

    def test_reassign(self):
        shelf.c = torch.tensor([[1, 2, 3], [4, 5, 6], [9, 10, 11]])
        shelf.c = shelf.c.clone().view(9, -1)
        self.assertEqual(tuple(shelf.c.shape), (9, 1))
        with self.assertRaises(RuntimeError):
            shelf.c = shelf.c.view(3, 3)

    def test_gradient(self):
        shelf.g = torch.tensor(1.0, requires_grad=True)
        z = shelf.g**3
        z.backward()
        self.assertEqual(shelf.g.grad.item(), 3.0)
