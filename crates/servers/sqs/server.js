// A server that speaks the protocol of Amazon SQS, on one port of the loopback, in memory.
import { buildApp } from "fauxqs";

const app = buildApp({ logger: false, host: "127.0.0.1" });
await app.listen({ port: Number(process.argv[2]), host: "127.0.0.1" });
