/* The nesting of slices, in one pass over their columns: what window.py otherwise does with numpy, which sorts for it.

   nest(threads, starts, ends) takes columns of slices by start, the longer first, as bytes (int32, int64, int64), and
   returns their parents and depths (int32).  nearest(parents, which) takes the parents of all slices (int32) and whether
   each is wanted (one byte each), and returns the wanted slice that each is, or is in (int32); -1: none.

   Memory safety: lengths must fit one another, threads must be from 0 to MOST_THREADS, and a parent must be before its
   child; what is not so is a ValueError.

   It uses the limited API of Python 3.10 only. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define MOST_THREADS (1 << 24)

static PyObject *refused(const char *reason) {
    PyErr_SetString(PyExc_ValueError, reason);
    return NULL;
}

/* Columns of Python need not be aligned. */
static inline int32_t int32_at(const char *column, Py_ssize_t at) {
    int32_t value;
    memcpy(&value, column + 4 * at, 4);
    return value;
}

static inline int64_t int64_at(const char *column, Py_ssize_t at) {
    int64_t value;
    memcpy(&value, column + 8 * at, 8);
    return value;
}

static PyObject *nest(PyObject *module, PyObject *args) {
    const char *threads, *starts, *ends;
    Py_ssize_t threads_size, starts_size, ends_size, count;
    int32_t *tops = NULL, *below = NULL, *parents, *depths, thread_count = 0;
    PyObject *parents_out = NULL, *depths_out = NULL, *found = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#y#y#", &threads, &threads_size, &starts, &starts_size, &ends, &ends_size)) return NULL;
    count = threads_size / 4;
    if (threads_size % 4 || starts_size != 8 * count || ends_size != 8 * count || count > INT32_MAX)
        return refused("columns of different length");
    for (Py_ssize_t at = 0; at < count; at++) {
        int32_t thread = int32_at(threads, at);
        if (thread < 0 || thread >= MOST_THREADS) return refused("a thread out of range");
        if (thread >= thread_count) thread_count = thread + 1;
    }
    parents_out = PyByteArray_FromStringAndSize(NULL, 4 * count);
    depths_out = PyByteArray_FromStringAndSize(NULL, 4 * count);
    tops = PyMem_Malloc(4 * (size_t)thread_count + 4);
    below = PyMem_Malloc(4 * (size_t)count + 4);
    if (!parents_out || !depths_out) goto done;
    if (!tops || !below) {
        PyErr_NoMemory();
        goto done;
    }
    parents = (int32_t *)PyByteArray_AsString(parents_out);
    depths = (int32_t *)PyByteArray_AsString(depths_out);
    for (int32_t thread = 0; thread < thread_count; thread++) tops[thread] = -1;
    for (int32_t at = 0; at < (int32_t)count; at++) {
        /* The open slices of a thread, from the newest (tops) down (below); their ends never increase upwards.  A slice
           that ends before the newest can enclose nothing that the newest, which is nearer, does not. */
        int32_t thread = int32_at(threads, at), top = tops[thread];
        int64_t start = int64_at(starts, at), end = int64_at(ends, at);
        while (top >= 0 && (int64_at(ends, top) < end || int64_at(ends, top) <= start)) top = below[top];
        parents[at] = top;
        depths[at] = top >= 0 ? depths[top] + 1 : 0;
        below[at] = top;
        tops[thread] = at;
    }
    found = PyTuple_Pack(2, parents_out, depths_out);
done:
    PyMem_Free(tops);
    PyMem_Free(below);
    Py_XDECREF(parents_out);
    Py_XDECREF(depths_out);
    return found;
}

static PyObject *nearest(PyObject *module, PyObject *args) {
    const char *parents, *which;
    Py_ssize_t parents_size, count;
    PyObject *out;
    int32_t *found;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#y#", &parents, &parents_size, &which, &count)) return NULL;
    if (parents_size % 4 || count != parents_size / 4 || count > INT32_MAX) return refused("columns of different length");
    out = PyByteArray_FromStringAndSize(NULL, parents_size);
    if (!out) return NULL;
    found = (int32_t *)PyByteArray_AsString(out);
    for (int32_t at = 0; at < (int32_t)count; at++) {
        int32_t parent = int32_at(parents, at);
        if (parent >= at) {
            Py_DECREF(out);
            return refused("a parent that is not before its child");
        }
        found[at] = which[at] ? at : parent >= 0 ? found[parent] : -1;
    }
    return out;
}

static PyMethodDef METHODS[] = {
    {"nest", nest, METH_VARARGS, "nest(threads, starts, ends): (parents, depths) of slices by start, the longer first."},
    {"nearest", nearest, METH_VARARGS, "nearest(parents, which): of each slice, itself or the nearest around it; -1: none."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE_OF = {PyModuleDef_HEAD_INIT, "native_calls", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native_calls(void) { return PyModule_Create(&MODULE_OF); }
