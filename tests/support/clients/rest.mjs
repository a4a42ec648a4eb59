// Node's HTTP clients as they are. Arguments: "http" or "fetch", address. Lines of standard input and output: see
// http_clients.py.
import http from "node:http";
import readline from "node:readline";

const [library, address] = process.argv.slice(2);
const agent = new http.Agent({ keepAlive: true });

function byHttp(method, path, chunked, headers, body) {
  return new Promise((resolve, reject) => {
    const [host, port] = address.split(":");
    const framing = method === "GET" ? {} : chunked ? { "Transfer-Encoding": "chunked" } : { "Content-Length": body.length };
    const request = http.request({ host, port, path, method, agent, headers: { ...headers, ...framing } }, (answer) => {
      const parts = [];
      answer.on("data", (part) => parts.push(part));
      answer.on("end", () => resolve([answer.statusCode, (name) => answer.headers[name], Buffer.concat(parts)]));
      answer.on("error", reject);
    });
    request.on("error", reject);
    if (method === "GET") request.end();
    else request.end(body);
  });
}

async function byFetch(method, path, chunked, headers, body) {
  const stream = () => new ReadableStream({ start: (out) => { if (body.length) out.enqueue(body); out.close(); } });
  const content = method === "GET" ? {} : chunked ? { body: stream(), duplex: "half" } : { body };
  const answer = await fetch(`http://${address}${path}`, { method, headers, ...content });
  return [answer.status, (name) => answer.headers.get(name), Buffer.from(await answer.arrayBuffer())];
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  const [method, path, framing, given, data] = line.split("\t");
  const headers = Object.fromEntries(given ? given.split("|").map((header) => header.split(": ")) : []);
  const send = library === "http" ? byHttp : byFetch;
  const [status, header, body] = await send(method, path, framing === "chunked", headers, Buffer.from(data, "base64"));
  const length = header("inference-header-content-length") ?? "";
  console.log([status, header("content-type") ?? "", length, body.toString("base64")].join("\t"));
}
process.exit(0);
