# Strings, bytes, floats and integers that behave as Python's.
import unittest

import numpy as np
import pymm

shelf = pymm.shelf("myShelf", size_mb=1024, pmem_path="/mnt/pmem0", force_new=True)


class TestBaseTypes(unittest.TestCase):
    def test_string(self):
        shelf.x = pymm.string("Hello world!")
        self.assertTrue(str(shelf.x) == "Hello world!")
        shelf.y = "Good Day sir!"
        self.assertTrue(shelf.y == "Good Day sir!")
        self.assertTrue("Day" in shelf.y)
        self.assertFalse("foobar" in shelf.y)
        self.assertTrue(shelf.y.capitalize() == "Good day sir!")
        self.assertTrue(shelf.x.count("world") == 1)
        shelf.x += " Brilliant!"
        self.assertEqual(f"Modified >{shelf.x}<", "Modified >Hello world! Brilliant!<")

    def test_float(self):
        shelf.n = pymm.float_number(700.001)
        shelf.n *= 2
        shelf.n /= 2
        self.assertEqual(1.1 * shelf.n, 1.1 * 700.001)
        self.assertEqual(2.11 / shelf.n, 2.11 / 700.001)
        self.assertEqual(2.11 // shelf.n, 2.11 // 700.001)
        self.assertEqual(2.11 - shelf.n, 2.11 - 700.001)
        self.assertTrue(shelf.n * 2.0 == 1400.002)
        shelf.m = 700.001
        self.assertTrue(shelf.m == shelf.n)

    def test_integer(self):
        shelf.a = 2
        shelf.b = 30
        shelf.b = shelf.b / shelf.a
        self.assertEqual(shelf.b, 15)
        shelf.count = 1
        shelf.count += 1
        shelf.n = np.arange(0, 9).reshape(3, 3)
        shelf.p = shelf.n / int(shelf.count)
        self.assertTrue(np.array_equal(shelf.p, shelf.n / shelf.count))
        shelf.c = 10
        self.assertTrue(18 % shelf.c == 8)
        self.assertTrue(shelf.c % 3 == 1)

    def test_bytes(self):
        shelf.x = pymm.bytes("hello world", "utf-8")
        shelf.x += b"!  "
        self.assertTrue(shelf.x.decode() == "hello world!  ")
        shelf.z = pymm.bytes(range(3))
        self.assertTrue(shelf.z == b"\x00\x01\x02")
        shelf.y = shelf.x.strip()
        self.assertTrue(shelf.y.decode() == "hello world!")
        shelf.a = b"El ni\xc3\xb1o come camar\xc3\xb3n"
        self.assertEqual(shelf.a.decode(), "El niño come camarón")
        shelf.d = bytes([72, 101, 108, 108, 111])
        self.assertTrue(isinstance(shelf.d[1], int))
        self.assertTrue(chr(shelf.d[1]) == "e")
        self.assertTrue(isinstance(shelf.d[1:3], bytes))
        self.assertTrue(list(shelf.d[1:3]) == [101, 108])
        self.assertEqual(str(shelf.d), "b'Hello'")
