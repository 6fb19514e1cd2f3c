"""The one way to call functions in another process: frames, a child that serves, calls to it.

A child program hands its functions to `child.serve`. Whoever starts it makes a `ChildProcess`
(sealed, beside the service, or plain) and asks it through `calls.Calls`, or with `once.wait_once`
where a thread may block. `pool.ProcessPool` keeps processes for further work, `cap.ProcessCap`
bounds how many live.
"""
