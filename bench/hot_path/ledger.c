/* A prototype of the recorder's hot path in C: the ledger's words, the hooks around calls, and the end of a step.

   It does what src/stepscope/recorder/ledger.py, hooks/forward.py, hooks/optimizer.py and Recorder.end_step do in an
   ordinary step, without a Python frame.  Everything else (a timed device, a sampled step, a closure, another thread, an
   observer that is due, a check that is due, a search for the model) it gives to the hook in Python, unchanged.
   compare.py measures both.

   A Ledger has the attributes that the hooks in Python use, so both write the same ring.  The fields of the recorder that
   an ordinary step needs are here too; `lend` and `take` (two callables) copy them to the recorder before a hook in
   Python runs and back afterwards.  In a shipped version the recorder would keep them here and nothing would be copied.

   Two builds: with LEDGER_TP_CALL it uses nothing but the limited API of Python 3.10, so each call makes a tuple and maybe
   a dict of the arguments.  Without, it declares the vectorcall protocol itself, which the limited API has from 3.12 on;
   the same file then loads into 3.10 (which does not export PyObject_Vectorcall: see `invoke`) to 3.13.  The limited API
   of 3.10 has no buffers, so the ring is given by its address. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <structmember.h>

#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* ring/layout.py and records/steps.py */
enum { TIME_SHIFT = 5, ENTER = 16, STEP_END = 16, TURN_WORDS = 256, RESERVE_WORDS = 4 * TURN_WORDS, HEAD_WORD = 7 };
enum { STEP_SHIFT = 20, PHASE_SHIFT = 16 };
#define DATA (1ULL << 63)
#define STEP_DATA (DATA | 2ULL << 55)
#define WRAP_WORD (DATA | 11ULL << 55)
#define NOT_NOW (-1)
#define IN_TRAINING_MODE 1 /* hooks/forward.py */

/* -- Calls --------------------------------------------------------------------------------------------------------- */

#ifdef LEDGER_TP_CALL

typedef struct {
    PyObject *values, *names;
} Arguments;

static inline PyObject *invoke(PyObject *callable, Arguments a) { return PyObject_Call(callable, a.values, a.names); }
static inline Py_ssize_t count_of(Arguments a) { return PyTuple_Size(a.values); }
static inline PyObject *argument(Arguments a, Py_ssize_t at) { return PyTuple_GetItem(a.values, at); }
static inline int has_keywords(Arguments a) { return a.names != NULL && PyDict_Size(a.names) != 0; }

#else

#define HAVE_VECTORCALL (1UL << 11)
#define ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))
typedef PyObject *(*Vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);
extern PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *) __attribute__((weak));
extern PyObject *PyObject_VectorcallDict(PyObject *, PyObject *const *, size_t, PyObject *);
extern PyObject *PyVectorcall_Call(PyObject *, PyObject *, PyObject *);

typedef struct {
    PyObject *const *values;
    size_t flagged_count;
    PyObject *names;
} Arguments;

static inline Py_ssize_t count_of(Arguments a) { return (Py_ssize_t)(a.flagged_count & ~ARGUMENTS_OFFSET); }

static PyObject *invoke_in_3_10(PyObject *callable, Arguments a) {
    PyObject *named = NULL, *result;
    Py_ssize_t count = count_of(a);
    if (a.names != NULL) {
        named = PyDict_New();
        for (Py_ssize_t at = 0; named != NULL && at < PyTuple_Size(a.names); at++)
            if (PyDict_SetItem(named, PyTuple_GetItem(a.names, at), a.values[count + at])) Py_CLEAR(named);
        if (named == NULL) return NULL;
    }
    result = PyObject_VectorcallDict(callable, a.values, a.flagged_count, named);
    Py_XDECREF(named);
    return result;
}

static inline PyObject *invoke(PyObject *callable, Arguments a) {
    if (PyObject_Vectorcall == NULL) return invoke_in_3_10(callable, a);
    return PyObject_Vectorcall(callable, a.values, a.flagged_count, a.names);
}
static inline PyObject *argument(Arguments a, Py_ssize_t at) { return a.values[at]; }
static inline int has_keywords(Arguments a) { return a.names != NULL && PyTuple_Size(a.names) != 0; }

#endif

/* -- Ledger -------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    uint64_t *body, *header;
    long long at, limit, rounds, capacity;
    int phase;
    unsigned long thread; /* 0: nobody */
    PyObject *device, *before_backward;
    /* Of the recorder and its hooks: */
    long long step, flags, attend_at, ended_ns, slow_ns, trail_due;
    unsigned long long sole; /* 0 if the script marks its steps itself */
    int forward_seen, searching;
    long long returned;
    /* Hooks in Python that run now; while there are any, the fields above are the recorder's. */
    int lent;
    PyObject *lend, *take;
} Ledger;

static inline long long now_ns(void) {
    struct timespec now; /* the clock of time.perf_counter_ns */
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline void store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

static inline void publish(Ledger *l, long long at) {
    __atomic_store_n(&l->header[HEAD_WORD], (uint64_t)(l->rounds + at), __ATOMIC_RELEASE);
}

static inline void change(Ledger *l, int phase, int code) {
    store(&l->body[l->at], ((uint64_t)now_ns() << TIME_SHIFT) + (uint64_t)code);
    l->at++;
    l->phase = phase;
}

/* As Ledger.turn. */
static void turn(Ledger *l) {
    if (l->at > l->capacity - RESERVE_WORDS) {
        store(&l->body[l->at], WRAP_WORD);
        l->rounds += l->capacity;
        l->at = 0;
    }
    l->limit = l->at + TURN_WORDS;
    publish(l, l->at);
}

/* A phase ends, after a call that maybe raised. */
static PyObject *left(Ledger *l, int outer, PyObject *result) {
    int ended = l->phase;
    change(l, outer, outer);
    if (l->device != Py_None) { /* only since the phase began, or it would have begun in Python */
        PyObject *type, *value, *trace, *marked, *device = l->device;
        PyErr_Fetch(&type, &value, &trace);
        Py_INCREF(device);
        marked = PyObject_CallMethod(device, "mark", "ii", ended, outer);
        Py_DECREF(device);
        if (marked == NULL) {
            Py_CLEAR(result);
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(trace);
        } else {
            Py_DECREF(marked);
            PyErr_Restore(type, value, trace);
        }
    }
    if (l->at - 1 > l->limit) turn(l);
    return result;
}

static inline int is_ours(Ledger *l) { return !l->lent && PyThread_get_thread_ident() == l->thread; }

/* Let the hook in Python do it. */
static PyObject *in_python(Ledger *l, PyObject *hook, Arguments a) {
    PyObject *done, *result;
    if (l->lent++ == 0) {
        done = PyObject_CallNoArgs(l->lend);
        if (done == NULL) {
            l->lent--;
            return NULL;
        }
        Py_DECREF(done);
    }
    result = invoke(hook, a);
    if (--l->lent == 0) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        done = PyObject_CallNoArgs(l->take);
        if (done == NULL) {
            Py_CLEAR(result);
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(trace);
        } else {
            Py_DECREF(done);
            PyErr_Restore(type, value, trace);
        }
    }
    return result;
}

static int ledger_init(PyObject *self, PyObject *args, PyObject *names) {
    Ledger *l = (Ledger *)self;
    (void)args;
    (void)names;
    for (PyObject **each[] = {&l->device, &l->before_backward, &l->lend, &l->take}, ***at = each; at < each + 4; at++)
        if (**at == NULL) {
            Py_INCREF(Py_None);
            **at = Py_None;
        }
    return 0;
}

/* set_memory(body, header): where they are; the caller keeps them mapped.  (A shipped version would hold a buffer of the
   map instead, so that it cannot be closed below a hook: here that is a segmentation fault.) */
static PyObject *ledger_set_memory(PyObject *self, PyObject *args) {
    unsigned long long body, header;
    if (!PyArg_ParseTuple(args, "KK", &body, &header)) return NULL;
    ((Ledger *)self)->body = (uint64_t *)(uintptr_t)body;
    ((Ledger *)self)->header = (uint64_t *)(uintptr_t)header;
    Py_RETURN_NONE;
}

static int ledger_traverse(PyObject *self, visitproc visit, void *arg) {
    Ledger *l = (Ledger *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(l->device);
    Py_VISIT(l->before_backward);
    Py_VISIT(l->lend);
    Py_VISIT(l->take);
    return 0;
}

static int ledger_clear(PyObject *self) {
    Ledger *l = (Ledger *)self;
    Py_CLEAR(l->device);
    Py_CLEAR(l->before_backward);
    Py_CLEAR(l->lend);
    Py_CLEAR(l->take);
    return 0;
}

static void deallocate(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    ((inquiry)PyType_GetSlot(type, Py_tp_clear))(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define FIELD(name, kind) {#name, kind, offsetof(Ledger, name), 0, NULL}
static PyMemberDef LEDGER_FIELDS[] = {
    FIELD(at, T_LONGLONG), FIELD(limit, T_LONGLONG), FIELD(rounds, T_LONGLONG), FIELD(phase, T_INT),
    {"_capacity", T_LONGLONG, offsetof(Ledger, capacity), 0, NULL},
    FIELD(thread, T_ULONG), FIELD(device, T_OBJECT), FIELD(before_backward, T_OBJECT), FIELD(step, T_LONGLONG),
    FIELD(flags, T_LONGLONG), FIELD(attend_at, T_LONGLONG), FIELD(ended_ns, T_LONGLONG), FIELD(slow_ns, T_LONGLONG),
    FIELD(trail_due, T_LONGLONG), FIELD(sole, T_ULONGLONG), FIELD(forward_seen, T_INT), FIELD(searching, T_INT),
    FIELD(returned, T_LONGLONG), FIELD(lent, T_INT), FIELD(lend, T_OBJECT), FIELD(take, T_OBJECT),
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef LEDGER_METHODS[] = {
    {"set_memory", ledger_set_memory, METH_VARARGS, "set_memory(body, header): the addresses of the ring's parts."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot LEDGER_SLOTS[] = {
    {Py_tp_init, ledger_init}, {Py_tp_traverse, ledger_traverse}, {Py_tp_clear, ledger_clear},
    {Py_tp_dealloc, deallocate}, {Py_tp_members, LEDGER_FIELDS}, {Py_tp_methods, LEDGER_METHODS}, {0, NULL},
};
static PyType_Spec LEDGER_TYPE = {
    "ledger.Ledger", sizeof(Ledger), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, LEDGER_SLOTS,
};

/* -- Hooks --------------------------------------------------------------------------------------------------------- */

enum { TIMED, FORWARD, BEFORE, AFTER, EMPTY, NOTHING, KINDS };

typedef struct {
    PyObject_HEAD
#ifndef LEDGER_TP_CALL
    Vectorcall vectorcall;
#endif
    int kind, phase;
    Ledger *ledger;
    PyObject *original; /* what the hook stands for; BEFORE: the optimizers that are stepping */
    PyObject *python;   /* the hook in Python */
    PyObject *attributes, *references;
    long long due;                           /* TIMED: the step from which on an observer wants to see the arguments */
    PyObject *roots, *frozen, *grad_enabled; /* FORWARD */
    PyObject *entry;                         /* BEFORE: what it puts into `original` … */
    uintptr_t entry_of;                      /* … for this optimizer … */
    int entry_outer;                         /* … outside of which was this phase */
    PyObject *before;                        /* AFTER: the hook before the step */
} Hook;

static PyObject *TRAINING, *METHOD_TYPE;

static PyObject *timed(Hook *h, Arguments a) {
    Ledger *l = h->ledger;
    int outer = l->phase;
    if (outer == h->phase) return invoke(h->original, a);
    if (!is_ours(l) || l->device != Py_None || l->before_backward != Py_None || l->step >= h->due)
        return in_python(l, h->python, a);
    change(l, h->phase, h->phase + ENTER);
    return left(l, outer, invoke(h->original, a));
}

/* Whether it is a model in training mode: 1, another module: 0, to be decided in Python: -1. */
static int trains(Hook *h, PyObject *module) {
    PyObject *key, *root, *inside, *mode;
    long how;
    if (h->ledger->searching || (mode = PyObject_CallNoArgs(h->grad_enabled)) == NULL) goto unknown;
    Py_DECREF(mode);
    if (mode != Py_True || (key = PyLong_FromVoidPtr(module)) == NULL) goto unknown;
    root = PyDict_GetItemWithError(h->roots, key);
    Py_DECREF(key);
    if (root == NULL) {
        if (PyErr_Occurred() || PyDict_Size(h->frozen)) goto unknown;
        return 0;
    }
    how = PyLong_AsLong(PyTuple_GetItem(root, 0));
    inside = PyTuple_GetItem(root, 1);
    if (how != IN_TRAINING_MODE || inside == NULL) goto unknown;
    inside = inside == Py_None ? Py_None : PyWeakref_GetObject(inside);
    inside = inside == Py_None ? module : inside;
    if (inside == NULL || (mode = PyObject_GetAttr(inside, TRAINING)) == NULL) goto unknown;
    Py_DECREF(mode);
    if (mode == Py_True) return 1;
unknown:
    PyErr_Clear();
    return -1;
}

static PyObject *forward(Hook *h, Arguments a) {
    Ledger *l = h->ledger;
    int outer = l->phase, training;
    if (count_of(a) == 0 || !is_ours(l) || l->device != Py_None) return in_python(l, h->python, a);
    training = trains(h, argument(a, 0));
    if (training < 0) return in_python(l, h->python, a);
    if (!training) return invoke(h->original, a);
    l->forward_seen = 1;
    if (outer == h->phase) return invoke(h->original, a);
    change(l, h->phase, h->phase + ENTER);
    return left(l, outer, invoke(h->original, a));
}

static PyObject *before(Hook *h, Arguments a) {
    Ledger *l = h->ledger;
    PyObject *optimizer;
    int outer = l->phase;
    if (count_of(a) != 3 || has_keywords(a) || !is_ours(l) || l->device != Py_None || outer == h->phase ||
        l->step >= l->trail_due || PyTuple_Size(argument(a, 1)) != 1 || PyDict_Size(argument(a, 2)) != 0 ||
        PyList_Size(h->original) != 0)
        return in_python(l, h->python, a);
    optimizer = argument(a, 0);
    if (h->entry == NULL || h->entry_of != (uintptr_t)optimizer || h->entry_outer != outer) {
        PyObject *entry = Py_BuildValue("(Ni)", PyLong_FromVoidPtr(optimizer), outer), *last = h->entry;
        if (entry == NULL) return NULL;
        h->entry = entry;
        h->entry_of = (uintptr_t)optimizer;
        h->entry_outer = outer;
        Py_XDECREF(last);
    }
    if (PyList_Append(h->original, h->entry)) return NULL;
    change(l, h->phase, h->phase + ENTER);
    Py_RETURN_NONE;
}

/* The fast path of Recorder.end_step. */
static PyObject *after(Hook *h, Arguments a) {
    Ledger *l = h->ledger;
    Hook *first = (Hook *)h->before;
    PyObject *open = first->original;
    long long at = l->at, ended_ns;
    int outer = first->entry_outer;
    if (count_of(a) != 3 || has_keywords(a) || !is_ours(l) || PyList_Size(open) != 1 ||
        PyList_GetItem(open, 0) != first->entry || (unsigned long long)(uintptr_t)argument(a, 0) != l->sole ||
        l->step >= l->attend_at || !l->forward_seen)
        return in_python(l, h->python, a);
    ended_ns = now_ns();
    if (ended_ns - l->ended_ns >= l->slow_ns) return in_python(l, h->python, a);
    if (PyList_SetSlice(open, 0, 1, NULL)) return NULL;
    l->returned++;
    store(&l->body[at], ((uint64_t)ended_ns << TIME_SHIFT) + STEP_END);
    store(&l->body[at + 1], STEP_DATA | (uint64_t)l->step << STEP_SHIFT | (uint64_t)outer << PHASE_SHIFT | (uint64_t)l->flags);
    l->phase = outer;
    l->at = at + 2;
    l->step++;
    l->flags = l->forward_seen = 0;
    l->ended_ns = ended_ns;
    if (at > l->limit) turn(l);
    else publish(l, at + 2);
    Py_RETURN_NONE;
}

static PyObject *empty(Hook *h, Arguments a) { return invoke(h->original, a); }

static PyObject *nothing(Hook *h, Arguments a) {
    (void)h;
    (void)a;
    Py_RETURN_NONE;
}

#ifdef LEDGER_TP_CALL
static PyObject *hook_call(PyObject *self, PyObject *values, PyObject *names) {
    static PyObject *(*const KIND[KINDS])(Hook *, Arguments) = {timed, forward, before, after, empty, nothing};
    return KIND[((Hook *)self)->kind]((Hook *)self, (Arguments){values, names});
}
#else
#define VECTORCALL(kind)                                                                                     \
    static PyObject *kind##_vectorcall(PyObject *self, PyObject *const *values, size_t n, PyObject *names) { \
        return kind((Hook *)self, (Arguments){values, n, names});                                            \
    }
VECTORCALL(timed)
VECTORCALL(forward)
VECTORCALL(before)
VECTORCALL(after)
VECTORCALL(empty)
VECTORCALL(nothing)
static const Vectorcall KIND[KINDS] = {timed_vectorcall, forward_vectorcall, before_vectorcall,
                                       after_vectorcall, empty_vectorcall,   nothing_vectorcall};
#endif

/* Hook(kind, ledger, original, python, phase, more): `more` is for FORWARD (roots, frozen, grad_enabled), for AFTER the hook
   before the step. */
static int hook_init(PyObject *self, PyObject *args, PyObject *names) {
    Hook *h = (Hook *)self;
    PyObject *ledger, *original, *python, *more;
    (void)names;
    if (h->ledger != NULL || !PyArg_ParseTuple(args, "iOOOiO", &h->kind, &ledger, &original, &python, &h->phase, &more)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a hook is made once");
        return -1;
    }
    if (h->kind < 0 || h->kind >= KINDS) {
        PyErr_SetString(PyExc_ValueError, "no such kind");
        return -1;
    }
    if (h->kind == FORWARD && !PyArg_ParseTuple(more, "OOO", &h->roots, &h->frozen, &h->grad_enabled)) return -1;
    if (h->kind == AFTER) h->before = more;
    h->ledger = (Ledger *)ledger;
    h->original = original;
    h->python = python;
    h->due = INT64_MAX;
    Py_INCREF(ledger);
    Py_INCREF(original);
    Py_INCREF(python);
    Py_XINCREF(h->roots);
    Py_XINCREF(h->frozen);
    Py_XINCREF(h->grad_enabled);
    Py_XINCREF(h->before);
#ifndef LEDGER_TP_CALL
    h->vectorcall = KIND[h->kind];
#endif
    return 0;
}

/* Binds like a function; the interpreter asks for this only outside of calls.  PyMethod_New is not in the limited API. */
static PyObject *hook_get(PyObject *self, PyObject *object, PyObject *type) {
    (void)type;
    if (object != NULL && object != Py_None) return PyObject_CallFunctionObjArgs(METHOD_TYPE, self, object, NULL);
    Py_INCREF(self);
    return self;
}

/* Pickled and copied like a function: by its name. */
static PyObject *hook_reduce(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyObject_GetAttrString(self, "__qualname__");
}

static int hook_traverse(PyObject *self, visitproc visit, void *arg) {
    Hook *h = (Hook *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)h->ledger);
    Py_VISIT(h->original);
    Py_VISIT(h->python);
    Py_VISIT(h->attributes);
    Py_VISIT(h->roots);
    Py_VISIT(h->frozen);
    Py_VISIT(h->grad_enabled);
    Py_VISIT(h->entry);
    Py_VISIT(h->before);
    return 0;
}

static int hook_clear(PyObject *self) {
    Hook *h = (Hook *)self;
    if (h->references != NULL) PyObject_ClearWeakRefs(self);
    Py_CLEAR(h->ledger);
    Py_CLEAR(h->original);
    Py_CLEAR(h->python);
    Py_CLEAR(h->attributes);
    Py_CLEAR(h->roots);
    Py_CLEAR(h->frozen);
    Py_CLEAR(h->grad_enabled);
    Py_CLEAR(h->entry);
    Py_CLEAR(h->before);
    return 0;
}

static PyMemberDef HOOK_FIELDS[] = {
#ifndef LEDGER_TP_CALL
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Hook, vectorcall), READONLY, NULL},
#endif
    {"__dictoffset__", T_PYSSIZET, offsetof(Hook, attributes), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Hook, references), READONLY, NULL},
    {"due", T_LONGLONG, offsetof(Hook, due), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef HOOK_METHODS[] = {
    {"__reduce__", hook_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef HOOK_GETTERS[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot HOOK_SLOTS[] = {
    {Py_tp_init, hook_init}, {Py_tp_traverse, hook_traverse}, {Py_tp_clear, hook_clear}, {Py_tp_dealloc, deallocate},
    {Py_tp_descr_get, hook_get}, {Py_tp_members, HOOK_FIELDS}, {Py_tp_methods, HOOK_METHODS},
    {Py_tp_getset, HOOK_GETTERS},
#ifdef LEDGER_TP_CALL
    {Py_tp_call, hook_call},
#else
    {Py_tp_call, PyVectorcall_Call},
#endif
    {0, NULL},
};
static PyType_Spec HOOK_TYPE = {
    "ledger.Hook", sizeof(Hook), 0,
#ifndef LEDGER_TP_CALL
    HAVE_VECTORCALL |
#endif
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR,
    HOOK_SLOTS,
};

/* -- Module -------------------------------------------------------------------------------------------------------- */

static PyObject *clock_ns(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return PyLong_FromLongLong(now_ns());
}

static PyMethodDef METHODS[] = {
    {"clock_ns", clock_ns, METH_NOARGS, "The clock of the words."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE_OF = {PyModuleDef_HEAD_INIT, "ledger", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

static int fill(PyObject *module) {
    PyObject *ledger = PyType_FromSpec(&LEDGER_TYPE), *hook = PyType_FromSpec(&HOOK_TYPE);
    PyObject *types = PyImport_ImportModule("types");
    int failed = ledger == NULL || hook == NULL || types == NULL;
    if (!failed) {
        METHOD_TYPE = PyObject_GetAttrString(types, "MethodType");
        TRAINING = PyUnicode_InternFromString("training");
        failed = METHOD_TYPE == NULL || TRAINING == NULL || PyModule_AddObjectRef(module, "Ledger", ledger) ||
                 PyModule_AddObjectRef(module, "Hook", hook) || PyModule_AddIntConstant(module, "TIMED", TIMED) ||
                 PyModule_AddIntConstant(module, "FORWARD", FORWARD) || PyModule_AddIntConstant(module, "BEFORE", BEFORE) ||
                 PyModule_AddIntConstant(module, "AFTER", AFTER) || PyModule_AddIntConstant(module, "EMPTY", EMPTY) ||
                 PyModule_AddIntConstant(module, "NOTHING", NOTHING);
    }
    Py_XDECREF(ledger);
    Py_XDECREF(hook);
    Py_XDECREF(types);
    return failed;
}

PyMODINIT_FUNC PyInit_ledger(void) {
    PyObject *module = PyModule_Create(&MODULE_OF);
    if (module != NULL && fill(module)) Py_CLEAR(module);
    return module;
}
