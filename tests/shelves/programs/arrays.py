# Arrays: shadow type and copy, reassignment with another shape, reshape, slices, columns, part of an array persisted.
import unittest

import numpy as np
import pymm

force_new = True


class TestNdarray(unittest.TestCase):
    def setUp(self):
        global force_new
        self.s = pymm.shelf("myShelf", size_mb=1024, pmem_path="/mnt/pmem0", force_new=force_new)
        force_new = False

    def tearDown(self):
        del self.s

    def test_assignment(self):
        expected = np.full([2, 2, 2], 9, np.uint8)
        for shadow in (np.ndarray, pymm.ndarray):
            self.s.w = shadow((100, 100), dtype=np.uint8)
            self.s.w = shadow([2, 2, 2], dtype=np.uint8)
            self.s.w.fill(9)
            self.assertTrue(np.array_equal(self.s.w, expected))
        self.s.erase("w")

    def test_shape(self):
        self.s.r = np.ndarray((3, 4))
        self.s.r.fill(1)
        self.assertTrue(self.s.r.shape[0] == 3 and self.s.r.shape[1] == 4)
        self.s.r2 = self.s.r.reshape((2, 6))
        self.assertEqual(self.s.r2.shape, (2, 6))
        self.s.r3 = self.s.r.reshape((1, -1))
        self.s.r2.fill(2)
        self.s.r3.fill(3)
        self.assertEqual([float(x.sum()) for x in (self.s.r, self.s.r2, self.s.r3)], [12, 24, 36])
        for name in ("r", "r2", "r3"):
            self.s.erase(name)

    def test_slicing(self):
        self.s.w = np.ones((3, 5), dtype=np.uint8)
        self.s.w_flat = self.s.w.reshape(-1)
        self.assertTrue(np.array_equal(self.s.w_flat, np.ones((15,), dtype=np.uint8)))
        self.s.x = np.arange(0, 10)
        self.assertTrue(self.s.x[-1] == 9)
        self.assertTrue(self.s.x[-2] == 8)
        self.assertTrue(np.array_equal(self.s.x[-2:], [8, 9]))
        self.assertTrue(np.array_equal(self.s.x[::-1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]))
        self.assertTrue(np.array_equal(self.s.x[-3::-1], [7, 6, 5, 4, 3, 2, 1, 0]))
        self.assertTrue(np.array_equal(self.s.x[:-3:-1], [9, 8]))
        self.s.i = 1
        self.assertEqual(self.s.w[:, int(self.s.i)].tolist(), self.s.w[:, self.s.i].tolist())

    def test_columns(self):
        q = np.array([0.1, 1.9, 2.2])
        self.s.B = np.zeros((3, 4), dtype=np.uint8)
        self.s.B[1] = 1
        self.s.B[:, 0] = 2
        self.s.B[:, 0] = q
        self.assertEqual(self.s.B.tolist(), [[0, 0, 0, 0], [1, 1, 1, 1], [2, 0, 0, 0]])
        self.s.b = np.arange(3).reshape(3, 1)
        self.s.c = np.arange(3).reshape(3, 1)
        self.s.B[:, 0] = (self.s.b - self.s.c).reshape(-1)
        self.assertEqual(self.s.B[:, 0].tolist(), [0, 0, 0])

    def test_matrix_operation(self):
        self.s.theta = pymm.ndarray((3, 4))
        self.s.theta.fill(2.0)
        self.s.moment = pymm.ndarray((3, 4))
        self.s.moment.fill(1.25)
        self.s.theta_deviation = (self.s.theta - self.s.moment).reshape(-1)
        self.assertEqual(self.s.theta_deviation.tolist(), [0.75] * 12)

    def test_partial_persist(self):
        self.s.r = np.ndarray((10,))
        self.s.r.fill(1)
        self.s.r.persist_offset(0, 1)
        self.s.r.persist_offset(5, 5)
        with self.assertRaises(Exception):
            self.s.r.persist_offset(5, 6)
