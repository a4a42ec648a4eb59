"""Traces of requests in the layouts of public data sets. Expected: requests, span [s]; or words of the refusal."""

import gzip

from tests.public_reports.report import Report

KIND = "trace"


def minutes(*rows: str) -> str:
    names = ",".join(str(i + 1) for i in range(1440))
    return f"HashOwner,HashApp,HashFunction,Trigger,{names}\n" + "".join(
        f"{row}" + ",0" * (1440 - row.count(",") + 3) + "\n" for row in rows
    )


def row(source: str, text: str | bytes, expected: object, **options: object) -> Report:
    return Report(KIND, source, (text, options), expected)


READ = (
    row("requests by the second", "second,requests\n0,10\n1,20\n2,30\n", (60, 3)),
    row("a third column that is not a rate", "second,requests,errors\n0,10,1\n1,20,0\n", (30, 2)),
    row("requests by the minute", "minute,requests\n0,60\n1,120\n", (180, 120)),
    row("SWIM: jobs by the minute", "minute,jobs\n0,1\n1,5\n", (6, 120)),
    row("views by the hour", "hour,views\n5,3600\n6,7200\n", (10_800, 7200)),
    row("requests by the day", "day,requests\n0,86400\n1,86400\n", (172_800, 172_800)),
    row(
        "five-minute counts with dates", "timestamp,requests\n2024-05-10 00:00,300\n2024-05-10 00:05,600\n", (900, 600)
    ),
    row(
        "hourly counts, dates without separators", "timestamp,views\n2015100100,3600\n2015100101,7200\n", (10_800, 7200)
    ),
    row("rates in queries per second", "time_s,qps\n0,10\n30,20\n60,30\n", (1800, 90)),
    row(
        "Locust: a rate, by setting",
        "Timestamp,User Count,Requests/s,Failures/s,Total Request Count\n"
        "1700000000,10,10.0,0,1\n1700000001,10,20.0,0,11\n",
        (30, 2),
        column="Requests/s",
    ),
    row(
        "a mean rate by setting",
        "timestamp,avg_rps\n2024-05-10 00:00,10\n2024-05-10 00:05,20\n",
        (9000, 600),
        column="avg_rps",
    ),
    row(
        "JMeter",
        "timeStamp,elapsed,label,success,Latency,IdleTime,Connect\n1700000000500,10,a,true,1,0,1\n"
        "1700000000700,10,a,true,1,0,1\n1700000003000,9,b,true,1,0,1\n",
        (3, 3),
    ),
    row(
        "Vegeta: nanoseconds without a header, by setting",
        "1700000000000000000,200,1234,GET\n1700000000700000000,200,999,GET\n",
        (2, 1),
        time_column="1",
    ),
    row("headers in capitals, semicolons", "SECOND;REQUESTS\n0;10\n1;20\n", (30, 2)),
    row("rates with their unit", "datetime;requests/min\n2024-01-01T00:00Z;60\n2024-01-01T00:10Z;120\n", (1800, 1200)),
    row("seconds since 1970 with counts", "timestamp,count\n1700000000,5\n1700000060,7\n", (12, 120)),
    row("Azure Functions 2019", minutes("o1,a1,f1,http,3,1,2", "o1,a1,f2,timer,1,1,1", "o2,a2,f3,queue"), (9, 86_400)),
    row("Azure Functions 2019, one function", minutes("o,a,f1,http,3", "o,a,f2,http,8"), (8, 86_400), column="f2"),
    row(
        "Azure Functions 2021: dated by their end",
        "app,func,end_timestamp,duration\na,f,10.5,0.5\na,f,12.0,3.0\na,g,14.0,1.0\n",
        (3, 5),
    ),
    row(
        "Azure LLM 2023",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,4808,10\n"
        "2023-11-16 18:15:50.9951690,3180,8\n2023-11-16 18:15:51.2225670,110,27\n",
        (3, 5),
    ),
    row(
        "Azure LLM 2024, at equal distances",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.000000+00:00,2162,5\n"
        "2024-05-10 00:00:01.000000+00:00,2399,6\n2024-05-10 00:00:02+00:00,76,15\n",
        (3, 3),
    ),
    row(
        "BurstGPT",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,230,1317,Conversation log\n118.5,GPT-4,417,276,693,API log\n",
        (3, 114),
    ),
    row(
        "BurstGPT with sessions",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,1,2.5,ChatGPT,472,18,490,Conversation log\n15,2,1.5,GPT-4,417,276,693,API log\n",
        (2, 11),
    ),
    row(
        "Wikipedia: WikiBench",
        "4619 1194892620.002 http://en.wikipedia.org/wiki/A -\n4620 1194892620.002 http://de.wikipedia.org/wiki/B -\n"
        "4621 1194892621.503 http://en.wikipedia.org/wiki/C save\n",
        (3, 2),
    ),
    row(
        "Wikipedia: WikiBench 2010, with dates",
        "154132716 2010-05-27T09:31:55.63 http://en.m.wikipedia.org/wiki/A -\n"
        "154132717 2010-05-27T09:31:56.70 http://en.m.wikipedia.org/wiki/B -\n",
        (2, 2),
    ),
    row(
        "Wikipedia: caching",
        "relative_unix\thashed_path_query\timage_type\tresponse_size\ttime_firstbyte\n0\t833\tjpeg\t24665\t0.0001\n"
        "0\t834\tpng\t11\t0.0002\n3\t835\tjpeg\t24\t0.1\n",
        (3, 4),
    ),
    row("Twitter by the second", "second,tweets\n0,42\n1,50\n", (92, 2)),
    row("Twitter: numbers in one line", "42 50 61\n", (153, 3), bin_s=1.0),
    row("Twitter: a number a line", "42\n50\n61\n", (153, 180), bin_s=60.0),
    row(
        "Twitter: cache trace",
        "0,q:1:8W,17,213,4,get,0\n0,yDq,17,27,6,get,0\n2,Ql,17,27,6,set,9\n",
        (3, 3),
        time_column="1",
        time_unit="s",
    ),
    row(
        "Alibaba microservices: all calls of a trace are one request",
        ",traceid,timestamp,rpcid,um,rpctype,dm,interface,rt\n0,t1,2500,0.1,A,rpc,B,i,3\n1,t2,1000,0.1,A,rpc,B,i,2\n"
        "2,t1,2000,0,U,http,A,i,9\n",
        (2, 2),
    ),
    row(
        "Alibaba GPU 2023",
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        "openb-pod-0000,1200,16384,1,1000,,LS,Running,0,12537496,0\n"
        "openb-pod-0001,6000,12288,1,460,,LS,Running,61,12902960,61\n",
        (2, 62),
    ),
    row(
        "Alibaba GenAI: requests",
        "gmt_create,predict_type,predict_status,exec_time_seconds,groupId\n"
        "2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,32.0,G0\n"
        "2024-11-15 16:57:51,TXT_2_IMG,SUCCEED,12.0,G0\n2024-11-15 16:58:50,TXT_2_IMG,SUCCEED,30.0,G1\n",
        (3, 61),
    ),
    row(
        "Alibaba batch tasks 2018",
        "M1,1,j_1,1,Terminated,86400,86402,100,0.5\nM2,1,j_2,1,Terminated,86410,86411,50,0.1\n",
        (2, 11),
        time_column="6",
        time_unit="s",
    ),
    row(
        "Alibaba Qwen, JSON lines",
        '{"chat_id": 1, "timestamp": 0.5, "input_length": 9, "hash_ids": [1]}\n'
        '{"chat_id": 2, "timestamp": 2.0, "input_length": 9, "hash_ids": [1]}\n',
        (2, 2),
    ),
    row(
        "Mooncake, JSON lines in milliseconds",
        '{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [0]}\n'
        '{"timestamp": 3000, "input_length": 6, "output_length": 5, "hash_ids": [0]}\n',
        (2, 4),
    ),
    row("plain dates", "2024-01-01T00:00:00Z\n2024-01-01T00:00:01Z\n2024-01-01T00:00:09Z\n", (3, 10)),
    row("plain seconds since 1970", "1700000000.5\n1700000001.5\n", (2, 2)),
    row("plain milliseconds since 1970", "timestamp\n1700000000500\n1700000002500\n", (2, 3)),
    row("arrival times from the beginning of the load", "arrival_s,tokens\n2.0,9\n3.5,9\n", (2, 4)),
    row(
        "microseconds since 1970",
        "timestamp,model\n1700000000000000,a\n1700000000500000,a\n1700000003000000,b\n",
        (3, 4),
    ),
    row("a byte-order mark, comments and empty lines", "\ufeff# where from\nsecond,requests\n\n0,1\n1,2\n", (3, 2)),
    row(
        "columns by setting",
        "when,who,much\n0,a,7\n60,b,9\n",
        (16, 120),
        time_column="when",
        time_unit="s",
        column="much",
    ),
    row("each row a request by setting", "t,who\n0,a\n1,b\n2,c\n", (3, 3), time_column="t", time_unit="s"),
    row("the width of a row by setting", "place,requests\n1,30\n2,60\n", (90, 600), bin_s=300.0),
    row(
        "attributes of each request",
        "timestamp,request_id,user_id,prompt_tokens,request_size,status\n1700000000,17,3,90,512,200\n"
        "1700000001,18,4,80,99,200\n1700000009,19,3,70,3,200\n",
        (3, 10),
    ),
    row(
        "a table of counts as requests, by setting",
        "time,users\n1700000000,3\n1700000060,4\n1700000180,2\n",
        (3, 181),
        time_column="time",
    ),
    row(
        "names of users",
        "timestamp,user\n1700000000,ann\n1700000060,bob\n1700000180,ann\n",
        (3, 181),
    ),
    row(
        "totals of each interval, which fall",
        "timestamp,total_requests\n1700000000,10\n1700000060,12\n1700000120,7\n",
        (29, 180),
    ),
    row("requests that rise", "second,requests\n0,1\n1,2\n2,3\n", (6, 3)),
    row(
        "Prometheus: the increase of a counter, by setting",
        "timestamp,increase(http_requests_total[1m])\n1700000000,10\n1700000060,12\n1700000120,12\n",
        (34, 180),
        column="increase(http_requests_total[1m])",
    ),
)
REFUSED = (
    row("counts before their second", "requests,second\n10,0\n20,1\n", "does not say how long a bin is"),
    row("unknown columns", "second,latency_ms\n0,10\n1,20\n", r"unknown header.*set column"),
    row("nothing known", "a,b\nx,1\n", r"unknown header.*time_column"),
    row("two counts", "second,requests,calls\n0,1,2\n", r"\['requests', 'calls'\].*several columns could count"),
    row(
        "a count and a rate",
        "timestamp,count,rps\n2024-01-01,60,1\n",
        r"\['count', 'rps'\].*several columns could count",
    ),
    row(
        "a rate of no unit by setting",
        "timestamp,request_rate\n2024-05-10 00:00,12\n2024-05-10 00:05,13\n",
        r"'request_rate'.*a rate of which unit.*rename that column to rps",
        column="request_rate",
    ),
    row(
        "Grafana: a query by setting",
        '"Time","sum(rate(http_requests_total[5m]))"\n2024-05-10 00:00:00,12.3\n2024-05-10 00:05:00,13.3\n',
        r"a rate of which unit",
        column="sum(rate(http_requests_total[5m]))",
    ),
    row(
        "rates of no unit with a gap",
        "timestamp,tps\n2024-05-10 00:00,12\n2024-05-10 00:05,13\n2024-05-10 00:15,9\n",
        r"have a column 'tps': they may be samples",
    ),
    row("two times", "timestamp,created,model\n2024-01-01,2024-01-01,a\n", r"several columns could date"),
    row(
        "days before months",
        "timestamp,requests\n10/05/2024 00:00,3\n10/05/2024 00:01,3\n",
        r"timestamp = '10/05/2024 00:00': .*not a time.*ISO 8601",
    ),
    row("decimal commas", "second;rps\n0;1,5\n1;2,5\n", r"rps = '1,5': .*line 2: no number.*decimals with a point"),
    row(
        "one JSON array",
        '[{"timestamp": 0.5, "model": "a"},\n{"timestamp": 1.5, "model": "a"}]',
        r"is one JSON array.*jq",
    ),
    row("gzip", gzip.compress(b"second,requests\n0,1\n"), r"is packed.*unpack it"),
    row("UTF-16", "second,requests\n0,1\n".encode("utf-16"), r"is not UTF-8.*save it as UTF-8"),
    row("an empty file", "", r"is empty"),
    row("more than anyone serves", "second,requests\n0,1e300\n1,5\n", r"line 2: more than a billion requests a second"),
    row("a time of no unit", "timestamp,model\n5,a\n45,b\n", r"unit of these times is not known.*time_unit"),
    row("numbers without a header", "42\n50\n", r"numbers without a header.*bin_s.*time_unit"),
    row("several columns without a header", "0,42\n1,50\n", r"unknown header.*column"),
    row(
        "header against time_unit",
        "time_ms,requests\n0,1\n1000,1\n",
        r"time_unit says 's', the file says 'ms'",
        time_unit="s",
    ),
    row(
        "format against time_unit",
        "Timestamp,Model,Request tokens,Response tokens\n5,a,1,1\n",
        r"time_unit says 'ms', the file says 's'",
        time_unit="ms",
    ),
    row(
        "dates against time_unit",
        "time,requests\n2024-01-01,1\n",
        r"time_unit says 's', the file says 'date'",
        time_unit="s",
    ),
    row(
        "header against bin_s",
        "second,requests\n0,1\n1,2\n2,3\n",
        r"1 s apart, but each counts 60 s by bin_s",
        bin_s=60.0,
    ),
    row(
        "seconds that step by minutes", "second,requests\n0,600\n60,600\n120,600\n", r"60 s apart, but each counts 1 s"
    ),
    row("minutes column against bin_s", minutes("o,a,f,http,3"), r"has a column a minute", bin_s=1.0),
    row("bin_s for single requests", "arrival_s\n0.5\n", r"no column of \['arrival_s'\] is one of counts", bin_s=1.0),
    row("milliseconds called seconds", "time_s,requests\n1700000000500,1\n1700000001500,1\n", r"no time in s"),
    row("no function of that name", minutes("o,a,f,http,3"), r"no request of that name", column="g"),
    row("no such column", "second,requests\n0,1\n", r"no such column.*use one of: second, requests", column="jobs"),
    row(
        "a carbon trace",
        "hour,inferred_datetime_utc,carbon_intensity_gco2_per_kwh\n0,2021-03-26T21:00Z,124.57\n",
        "unknown header",
    ),
    row(
        "samples of a metric",
        "timestamp,msname,metric,value\n2021-01-01 00:00:00,a,HTTP_MCR,3\n2021-01-01 00:01,a,HTTP_MCR,9\n",
        r"may be samples and not single requests",
    ),
    row(
        "a load at equal distances",
        "timestamp,intensity\n2021-01-01 00:00,3\n2021-01-01 01:00,4\n2021-01-01 02:00,5\n",
        r"rows lie at equal distances",
    ),
    row("a gap", "timestamp,requests\n2024-01-01 00:00,1\n2024-01-01 00:01,1\n2024-01-01 00:03,1\n", r"line 4: .*gap"),
    row("a negative count", "second,requests\n0,5\n1,-2\n", r"line 3: no count"),
    row("a minute without a number", minutes("o,a,f,http,3").replace("http,3,", "http,,"), r"line 2: no count"),
    row("unordered requests", "arrival_s\n1\n0.5\n", r"line 3: negative or earlier"),
    row(
        "a date that is none",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\nlater,1,1\n",
        r"line 3: not a date",
    ),
    row(
        "two days of Azure Functions in one file",
        minutes("o,a,f,http,3") + minutes("o,a,f,http,5"),
        r"line 3: header repeated.*one file a day",
    ),
    row(
        "two days of Azure Functions, one function",
        minutes("o,a,f,http,3") + minutes("o,a,f,http,5"),
        r"line 3: header repeated",
        column="f",
    ),
    row(
        "days of Azure Functions with other names in front",
        minutes("o,a,f,http,3") + minutes("o,a,f,http,5").replace("HashOwner", "Owner"),
        r"line 3: header repeated",
    ),
    row("two files of counts in one", "second,requests\n0,1\n1,2\nSecond,Requests\n0,1\n", r"line 4: header repeated"),
    row(
        "two files of requests in one",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\nTIMESTAMP,ContextTokens,GeneratedTokens\n",
        r"line 3: header repeated",
    ),
    row(
        "milliseconds among seconds",
        "timestamp\n1700000000\n1700000001\n1700000002000\n",
        r"timestamp = '1700000002000': .*line 4: more than ten years from the first row",
    ),
    row("a first row of 1970", "timestamp\n0\n1700000001\n", r"line 3: more than ten years", time_unit="s"),
    row("a first date of 1970", "time,model\n1970-01-01,a\n2024-01-01,b\n", r"'2024-01-01': .*line 3: more than ten"),
    row("an arrival after decades", "arrival_s\n1e9\n", r"line 2: more than ten years from the beginning"),
    row(
        "an end after decades",
        "app,func,end_timestamp,duration\na,f,10.5,0.5\na,f,1e300,3.0\n",
        r"line 3: more than ten years",
    ),
    row(
        "a call of a trace after decades",
        "timestamp,traceid,um,dm\n1,a,A,B\n1700000000000,b,A,B\n",
        r"line 3: more than ten years",
    ),
    row("counts of decades", "timestamp,requests\n0,1\n1700000001,1\n", r"line 3: more than ten", time_unit="s"),
    row("rows of decades", "1\n2\n", r"bin_s = 1000000000.0: .*line 1: more than ten years", bin_s=1e9),
    row("days of decades", "day,requests\n0,5\n9999,5\n", r"line 3: more than ten years"),
    row("JSON lines without fields", "{}\n{}\n", r"line 1: no object"),
    *(
        row(
            f"{name} with a gap",
            f"timestamp,{name}\n2024-01-01 00:00,3\n2024-01-01 00:05,6\n2024-01-01 00:15,6\n",
            r"have a column .*may be samples and not single requests.*set time_column",
        )
        for name in (
            "requests_k",
            "requests_per_5min",
            "users",
            "User Count",
            "connections",
            "requests_type_a",
            "krps",
            "Mreq/s",
        )
    ),
    row(
        "users whose first number is missing",
        "timestamp,users\n1700000000,NaN\n1700000060,4\n1700000180,2\n",
        r"have a column 'users'",
    ),
    *(
        row(
            f"{name} by setting",
            f"timestamp,{name}\n2024-01-01 00:00,3\n2024-01-01 00:05,6\n2024-01-01 00:10,6\n",
            r"a rate of which unit",
            column=name,
        )
        for name in ("requests_per_5min", "Mreq/s", "krps", "tokens/s", "qpm", "irate(http_requests_total[5m])")
    ),
    row(
        "Prometheus: a counter",
        "timestamp,http_requests_total\n1700000000,1000000\n1700000060,1000600\n1700000120,1001200\n",
        r"http_requests_total = 1000000.0: .*a running total.*differences",
    ),
    row(
        "Prometheus: a counter that stands still",
        "timestamp,http_requests_total\n1700000000,9\n1700000060,9\n1700000120,9\n",
        r"a running total",
    ),
    row(
        "Prometheus: a counter that began again",
        "second,requests_total\n" + "".join(f"{i},{100 + i if i < 20 else i - 20}\n" for i in range(40)),
        r"a running total",
    ),
    *(
        row(
            f"{name} by setting",
            f"timestamp,{name}\n1700000000,100\n1700000060,160\n1700000120,170\n",
            r"a running total",
            column=name,
        )
        for name in ("nv_inference_count", "nv_inference_request_success", "Total Request Count", "cumulative_requests")
    ),
    *(
        row(
            f"{name} by setting",
            f"timestamp,{name}\n1700000000,3\n1700000060,6\n1700000120,5\n",
            r"counts of thousands or millions.*requests",
            column=name,
        )
        for name in ("requests_k", "requests (thousands)", "million_requests")
    ),
)
