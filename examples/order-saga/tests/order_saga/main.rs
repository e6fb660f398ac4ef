//! The shop and those that it calls, each a process: killed between every two steps, with and without taking back.

#![allow(clippy::unwrap_used)]

mod faults;
mod kill;
mod redis;
mod world;
