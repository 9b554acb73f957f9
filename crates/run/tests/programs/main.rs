//! Unmodified programs under `shunt run`, with real kernels, and every byte compared.

mod actors;
mod backends;
mod bed;
mod chain;
mod chains;
mod costs;
mod edges;
mod files;
mod http;
mod https;
mod learning;
mod loss;
mod mix;
mod nginx;
mod openssls;
mod peers;
mod processes;
mod refused;
mod scarce;
mod signals;
mod silent;
mod slow;
mod stores;
mod strangers;
mod tls;
mod users;
