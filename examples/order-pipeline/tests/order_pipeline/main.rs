//! The whole way of orders, each part a process: killed at every point, killed at random, while database and broker go away.

#![allow(clippy::unwrap_used)]

mod kill;
mod part;
mod poison;
mod storm;
mod world;
