// start(launches, stream, values): start the kernels of a pass, one after another.
//
// `launches` are the bytes that replay.py describes: for each launch a Launch, then its parameters. `values` is a
// list of addresses, which are kernel parameters themselves, and of Triton's tensor maps, each at the end of its object.
// Triton's own launcher parses every argument of every launch, which takes as long as a third of the driver's work.
#define PY_SSIZE_T_CLEAN
#include "cuda.h"
#include <Python.h>
#include <stdint.h>

typedef struct {
  uint64_t function;
  uint32_t grid[3], threads, shared_bytes, early, num_parameters, unused;
} Launch;

typedef struct {
  int64_t place;  // in `values`, or -1 for a constant
  uint64_t constant;
} Parameter;

static PyObject *start(PyObject *self, PyObject *arguments) {
  const char *next;
  Py_ssize_t size;
  unsigned long long stream;
  PyObject *list;
  if (!PyArg_ParseTuple(arguments, "y#KO!", &next, &size, &stream, &PyList_Type, &list))
    return NULL;
  Py_ssize_t num_values = PyList_GET_SIZE(list);
  uint64_t numbers[num_values + 1];
  const void *places[num_values + 1];
  for (Py_ssize_t i = 0; i < num_values; i++) {
    PyObject *x = PyList_GET_ITEM(list, i);
    numbers[i] = PyLong_Check(x) ? PyLong_AsUnsignedLongLong(x) : 0;
    places[i] = PyLong_Check(x) ? (char *)&numbers[i] : (char *)x + Py_TYPE(x)->tp_basicsize - sizeof(CUtensorMap);
  }
  if (PyErr_Occurred())
    return NULL;
  CUcontext context = NULL;
  CUresult failed = cuCtxGetCurrent(&context);
  if (!failed && !context) {  // a new thread, whose device is 0
    failed = cuDevicePrimaryCtxRetain(&context, 0);
    failed = failed ? failed : cuCtxSetCurrent(context);
  }
  Py_BEGIN_ALLOW_THREADS;
  for (const char *end = next + size; next < end && !failed;) {
    const Launch *launch = (const Launch *)next;
    const Parameter *parameters = (const Parameter *)(launch + 1);
    const void *pointers[launch->num_parameters + 1];
    for (uint32_t i = 0; i < launch->num_parameters; i++)
      pointers[i] = parameters[i].place < 0 ? &parameters[i].constant : places[parameters[i].place];
    CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value = {{1}}};
    CUlaunchConfig config = {launch->grid[0], launch->grid[1],     launch->grid[2],  launch->threads, 1, 1,
                             launch->shared_bytes, (CUstream)stream, &early, launch->early};
    failed = cuLaunchKernelEx(&config, (CUfunction)launch->function, (void **)pointers, NULL);
    next = (const char *)(parameters + launch->num_parameters);
  }
  Py_END_ALLOW_THREADS;
  const char *reason = "unknown error";
  if (!failed)
    Py_RETURN_NONE;
  cuGetErrorString(failed, &reason);
  return PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", reason);
}

static PyMethodDef METHODS[] = {{"start", start, METH_VARARGS, NULL}, {NULL}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "flashspan_start", NULL, -1, METHODS};

PyMODINIT_FUNC PyInit_flashspan_start(void) { return PyModule_Create(&MODULE); }
